"""Converts names in a model with ``peft`` adapters to the plain names under which the model's tensors are stored."""

from __future__ import annotations

ADAPTER = "default"
"""Adapter name that is passed to ``peft``: each model has one set of adapters."""
SAVED_PREFIX = "base_model.model."
"""Prefix that ``peft`` puts before all names that it saves."""


def stored_name(name: str) -> str:
    """Return the name under which checkpoints store a tensor or module: without the parts that ``peft`` inserts."""
    plain = f"{name}.".replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")
    return plain.removesuffix(".")


def is_adapter(stored: str) -> bool:
    """Return whether a stored name belongs to a tensor of an adapter."""
    return ".lora_A." in stored or ".lora_B." in stored
