"""Names in a model that ``peft`` has adapted, and the plain ones under which its tensors are stored."""

from __future__ import annotations

ADAPTER = "default"
"""Name that ``peft`` gives to the only set of adapters here."""


def stored_name(name: str) -> str:
    """Return the stored name of a tensor or module of an adapted model."""
    plain = f"{name}.".replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")
    return plain.removesuffix(".")


def is_adapter(stored: str) -> bool:
    """Return whether a stored name belongs to a tensor of an adapter."""
    return ".lora_A." in stored or ".lora_B." in stored
