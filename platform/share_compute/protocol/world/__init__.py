"""A simulated world for the step protocol: machines that die, a network that errs, and weights that are symbols."""
