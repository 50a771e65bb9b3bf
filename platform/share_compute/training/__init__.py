"""Training: gradients, optimizers, loss scale, early stopping, intervals of checkpoints."""
