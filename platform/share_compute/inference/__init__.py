"""Inference: placement and autoscaling of deployments, their scheduler, and the computation in their members."""
