"""Sizes in Hugging Face configurations, whose keys differ between architectures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys under which Hugging Face configurations store the number of layers."""
WINDOW_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys under which Hugging Face configurations store the longest sequence, in tokens."""

KV_HEAD_KEYS = ("num_key_value_heads", "num_attention_heads", "n_head", "num_heads")
"""Keys under which Hugging Face configurations store the number of heads of keys and values; the first one counts."""


def whole_number(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first integer under ``keys`` in a configuration, then in its ``text_config``; None if not found."""
    text: Any = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    for part in parts:
        for key in keys:
            if type(part.get(key)) is int:  # isinstance would also accept JSON's true and false
                return int(part[key])
    return None
