"""Training: schedule of cells, optimizers, the arithmetic of a step."""
