"""Names the parameters that ranks must be sent; importing it loads no torch."""

from __future__ import annotations

from enum import IntEnum


class Outdated(IntEnum):
    """The parameters of a layer that may differ between ranks, because the first rank may have changed them."""

    none = 0
    trained = 1
    everything = 2
    """Also frozen parameters and buffers."""
