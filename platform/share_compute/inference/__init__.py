"""Inference: requests, placement and autoscaling; the scheduler and what members compute have folders of their own."""
