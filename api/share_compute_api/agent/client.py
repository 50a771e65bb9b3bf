"""HTTP client of a contributor's agent for the control plane."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

from share_compute.store.records import ContributorRecord
from share_compute_api.connection.discovery import Target
from share_compute_api.connection.transport import Transport
from share_compute_api.schemas.agents import (
    ClusterAccess,
    ContributorWork,
    DialReport,
    DialRequest,
    Joined,
    JoinRequest,
    Preflight,
    PreflightRequest,
    RejoinRequest,
    SiblingRequest,
)
from share_compute_api.schemas.bodies import Health
from share_compute_api.schemas.utilization import Utilization

_DIAL_S = 30.0
"""Time limit of a dial request, in seconds: unanswered ports take some seconds, and other machines may be tested first.
"""


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """A server's health, with the round-trip time and the clock skew measured by the request."""

    health: Health
    round_trip_s: float
    skew_s: float
    """Seconds by which this machine's clock is ahead of the server's."""


def probe_server(url: str, fingerprint: str | None = None) -> ServerProbe:
    """Fetch a server's health; measure the round-trip time, and the clock skew at the middle of the round trip."""
    before = datetime.now(UTC)
    health = fetch_health(url, fingerprint)
    round_trip = datetime.now(UTC) - before
    skew = before + round_trip / 2 - health.time
    return ServerProbe(health, round_trip.total_seconds(), skew.total_seconds())


def fetch_health(url: str, fingerprint: str | None = None, *, timeout_s: float = 10.0) -> Health:
    """Return the server's health and clock; needs no key."""
    with Transport(Target(url.rstrip("/"), None, fingerprint), timeout_s=timeout_s) as transport:
        return transport.read(Health, "GET", "/health")


def preflight(
    url: str, wanted: PreflightRequest, fingerprint: str | None = None, *, timeout_s: float = 10.0
) -> Preflight:
    """Check whether this machine may join with an invite, without using the invite; return the Ray head's address.

    Raises:
        InviteUnknown, InviteUsed, InviteExpired, InviteRevoked: the invite is not valid.
        VersionMismatch: this machine's versions do not fit the server's.
        InsecureTransport: the request came over plain HTTP from another machine.
        Unavailable: the server does not answer, or has no cluster.
    """
    with Transport(Target(url.rstrip("/"), None, fingerprint), timeout_s=timeout_s) as transport:
        return transport.read(
            Preflight, "POST", "/contributors/preflight", json=wanted.model_dump(mode="json")
        )


def join(url: str, wanted: JoinRequest, fingerprint: str | None = None, *, timeout_s: float = 30.0) -> Joined:
    """Join the cluster with an invite; return the contributor's key and the access to the cluster.

    If the server responds with an error, the invite stays unused.

    Raises:
        InviteUnknown, InviteUsed, InviteExpired, InviteRevoked: the invite is not valid.
        VersionMismatch: this machine's versions do not fit the server's.
        InsecureTransport: the request came over plain HTTP from another machine.
        ClockSkew: the clocks differ too much.
        UserError: the machine lends more than the invite allows.
        Conflict: the name is taken.
        Unavailable: the server does not answer, or has no cluster.
    """
    with Transport(Target(url.rstrip("/"), None, fingerprint), timeout_s=timeout_s) as transport:
        return transport.read(Joined, "POST", "/contributors", json=wanted.model_dump(mode="json"))


class AgentClient:
    """Client for one contributor, authenticated by the contributor's own key.

    Args:
        url: URL of the server.
        contributor_id: id of the contributor.
        key: the contributor's own key.
        fingerprint: fingerprint of the server's key; None to verify the certificate with public authorities.
        timeout_s: longest wait for a connection or for the next bytes of a response, in seconds.
    """

    def __init__(
        self,
        url: str,
        contributor_id: str,
        key: str,
        fingerprint: str | None = None,
        *,
        timeout_s: float = 10.0,
    ) -> None:
        self._transport = Transport(Target(url.rstrip("/"), key, fingerprint), timeout_s=timeout_s)
        self._path = f"/contributors/{contributor_id}"

    def online(self, *, node_id: str, address: str) -> ContributorRecord:
        """Report that the Ray node runs."""
        body = {"node_id": node_id, "address": address}
        return self._transport.read(ContributorRecord, "POST", f"{self._path}/online", json=body)

    def dial(self, wanted: DialRequest) -> DialReport:
        """Ask the server and some other machines to connect to this machine's ports; return their results."""
        body = wanted.model_dump(mode="json")
        return self._transport.read(DialReport, "POST", f"{self._path}/dial", json=body, timeout=_DIAL_S)

    def heartbeat(self, utilization: Utilization | None = None) -> ContributorWork:
        """Send a heartbeat; return the contributor's current work and whether it should leave.

        Args:
            utilization: measurement since the last reported one; None without a new measurement.
        """
        body = None if utilization is None else {"utilization": utilization.model_dump(exclude_none=True)}
        return self._transport.read(ContributorWork, "POST", f"{self._path}/heartbeat", json=body)

    def rejoin(self, wanted: RejoinRequest | None = None) -> ClusterAccess:
        """Rejoin the cluster; return the data that the machine needs to start its Ray node.

        Pass ``wanted`` after a restart of this agent, and leave it out otherwise.
        """
        body = None if wanted is None else wanted.model_dump(mode="json")
        return self._transport.read(ClusterAccess, "POST", f"{self._path}/rejoin", json=body)

    def join_sibling(self, wanted: SiblingRequest) -> Joined:
        """Add another device of this host to the cluster, as a separate contributor.

        Raises:
            NotAuthorized: the operator removed this host, or quarantined one of its devices.
            UserError: the device lends more than the invite of the host allows.
            Conflict: the name is taken, or the host has too many devices for one invite.
            VersionMismatch, InsecureTransport, ClockSkew, Unavailable: see `join`.
        """
        return self._transport.read(
            Joined, "POST", f"{self._path}/siblings", json=wanted.model_dump(mode="json")
        )

    def leave(self) -> ContributorRecord:
        """Report that the owner wants the machine back, so that jobs release it."""
        return self._transport.read(ContributorRecord, "POST", f"{self._path}/leave")

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
