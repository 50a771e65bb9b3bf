"""share-compute: join lent machines into one elastic cluster, to train and serve models too large for one machine."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    shard: Callable[..., Any]

__version__ = "0.2.0"

__all__ = ["__version__", "shard"]


def __getattr__(name: str) -> Any:
    """Import a function at its first use: the function imports torch, which most modules of this package do not need.

    Raises:
        AttributeError: the package has nothing of that name.
    """
    if name == "shard":
        return import_module("share_compute.sharding.functional").shard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
