"""share-compute: join lent machines into one elastic cluster, to train and serve models too large for one machine."""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    shard: Callable[..., Any]

__version__ = "0.2.0"

__all__ = ["__version__", "shard"]


class _Package(ModuleType):
    """This package, with functions that are imported at their first use, because they import torch."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name: cloudpickle does so only for objects whose class is the one of all modules."""
        return import_module, (self.__name__,)

    @property
    def shard(self) -> Any:
        """Return `share_compute.sharding.functional.shard`."""
        return import_module("share_compute.sharding.functional").shard

    @shard.setter
    def shard(self, module: ModuleType) -> None:
        """Ignore the module `share_compute.shard`, which Python assigns to this name when it is imported."""


sys.modules[__name__].__class__ = _Package
