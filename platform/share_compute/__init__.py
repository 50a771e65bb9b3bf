"""share-compute: join lent machines into one elastic cluster, to train and serve models too large for one machine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from share_compute.sharding.functional import shard

__version__ = "0.2.0"

__all__ = ["__version__", "shard"]


def __getattr__(name: str) -> Any:
    """Import a function at its first use, because it imports torch.

    Raises:
        AttributeError: the package has nothing of that name.
    """
    if name == "shard":
        from share_compute.sharding.functional import shard  # noqa: PLC0415 - it imports torch

        return shard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
