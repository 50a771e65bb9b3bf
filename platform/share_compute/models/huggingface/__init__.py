"""Hugging Face models: stages of decoders and encoders, their configurations and weights."""
