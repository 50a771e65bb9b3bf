"""The control plane: REST, the command line and the Python client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from share_compute_api.client.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    # Lazy: a bare `share-compute --help` must not pay for the imports of the client.
    if name == "Client":
        from share_compute_api.client.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
