"""Weights on disk: safetensors folders, checksums and checkpoints."""
