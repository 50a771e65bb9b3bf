"""Finds the address at which other machines reach the server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import ip_address

import psutil

from share_compute.quantities import listed
from share_compute.settings import Settings
from share_compute_actors.machine.preflight import route_address
from share_compute_api.connection.connections import is_loopback

_BEYOND = {4: "203.0.113.1", 6: "2001:db8::1"}
"""Documentation addresses (RFC 5737, RFC 3849). Packets to them would take the default route."""
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_LOOPBACK = {4: "127.0.0.1", 6: "::1"}
_CONTAINERS = ("br-", "cni", "docker", "podman", "veth", "virbr")
"""Name prefixes of network interfaces for containers and virtual machines on this machine."""


def advertised(settings: Settings) -> str:
    """Return the IP address that this machine advertises to other machines."""
    if settings.advertise_address:
        return settings.advertise_address
    version = _listens_everywhere(settings.host)
    if version is None:
        return _resolved(settings.host)
    own, route = _own_addresses(version), route_address(_BEYOND[version])
    return route if route in own else next(iter(own), _LOOPBACK[version])


def address_in_url(settings: Settings) -> str:
    """Return the IP address in the server's own URL.

    This is the advertised address, except on a server that listens on loopback alone, for example behind a proxy.
    """
    host = _resolved(settings.host)
    return host if is_loopback(host) else advertised(settings)


def address_warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings for the operator about the advertised IP address."""
    chosen = advertised(settings)
    version = _listens_everywhere(settings.host)
    if version is None or settings.advertise_address:
        return
    if is_loopback(chosen):
        yield (
            "other machines cannot join: this one has no address that they reach; "
            "connect it to a network, or give the address with --advertise-address"
        )
    elif others := [address for address in _own_addresses(version) if address != chosen]:
        yield (
            f"other machines join at {chosen}, and this one has {listed(others)} too; "
            "choose with --advertise-address"
        )


def _listens_everywhere(host: str) -> int | None:
    """Return the IP version (4 or 6) if the server listens on all addresses of this machine; else None."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return address.version if address.is_unspecified else None


def _resolved(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:
        return socket.gethostbyname(host)


def _own_addresses(version: int) -> list[str]:
    """Return the addresses of active interfaces, except loopback, link-local and container addresses."""
    states = psutil.net_if_stats()
    found = [
        ip_address(each.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup and not name.startswith(_CONTAINERS)
        for each in addresses
        if each.family == _FAMILIES[version]
    ]
    return [str(address) for address in found if not (address.is_loopback or address.is_link_local)]
