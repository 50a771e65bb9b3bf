"""The scheduler of a replica: a state machine that builds engine steps and assigns KV capacity."""
