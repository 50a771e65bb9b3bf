"""Checks that secrets of the cluster travel encrypted or stay on this machine."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from share_compute.errors import InsecureTransport
from share_compute.settings import Settings
from share_compute_api.connection.connections import is_loopback

if TYPE_CHECKING:  # agents import this module, and need no web framework
    from fastapi import Request

HINT: Final = (
    "start the server with `share-compute up --tls self-signed`, or behind a reverse proxy; on a network where nobody "
    "listens, `--insecure` allows it"
)
_FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


def require_private(request: Request, settings: Settings) -> None:
    """Refuse a request whose response could be read in transit, unless the operator allows plain HTTP.

    Raises:
        InsecureTransport: the request came over plain HTTP from another machine, and the operator does not allow that.
    """
    if request.url.scheme == "https" or settings.insecure or is_from_here(request):
        return
    raise InsecureTransport(
        "the cluster's token is not sent over plain HTTP to another machine; the invite stays unused",
        hint=HINT,
    )


def is_from_here(request: Request) -> bool:
    """Return whether a request originated on this machine, and was not forwarded by a proxy on it."""
    if request.client is None or any(name in request.headers for name in _FORWARDED):
        return False
    # The system drops packets from other machines that carry this machine's address as their source.
    server = request.scope.get("server")
    return is_loopback(request.client.host) or (server is not None and server[0] == request.client.host)


def require_private_url(url: str) -> None:
    """Refuse a URL to which a secret would be sent over plain HTTP to another machine.

    Raises:
        InsecureTransport: the URL is plain HTTP to another machine.
    """
    parts = urlsplit(url)
    if parts.scheme.lower() == "http" and not _is_here(parts.hostname or ""):
        raise InsecureTransport(
            f"{url} is plain HTTP to another machine: others on the way could read the cluster's token",
            hint=HINT,
        )


def _is_here(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # a connection to an unknown host fails later with a better message
    return all(_is_own(family, str(address[0])) for family, *_, address in found)


def _is_own(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
