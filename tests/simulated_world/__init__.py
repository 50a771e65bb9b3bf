"""A simulated world for the step protocol: machines that die, a network with faults, and weights that are symbols."""
