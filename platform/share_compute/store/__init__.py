"""The store: every change of state is a row here before it is an effect in the world."""
