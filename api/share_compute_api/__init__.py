"""The control plane: REST API, command line and Python client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from share_compute_api.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    # Imported lazily, so that `share-compute --help` does not load the client's imports.
    if name == "Client":
        from share_compute_api.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
