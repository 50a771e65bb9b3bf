"""The control plane: REST API, command line and Python client."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from share_compute_api.client.async_client import AsyncClient
    from share_compute_api.client.client import Client

__all__ = ["AsyncClient", "Client"]
_MODULES = {"AsyncClient": "async_client", "Client": "client"}


def __getattr__(name: str) -> Any:
    # Imported lazily, so that `share-compute --help` does not load the client's imports.
    if name in _MODULES:
        return getattr(import_module(f"share_compute_api.client.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
