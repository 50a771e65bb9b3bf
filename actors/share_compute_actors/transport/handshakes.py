"""Exchanges handshakes over the direct links between members before an epoch begins, to find dead links."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from share_compute.errors import ContributorLost
from share_compute.protocol.membership import Worker
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.envelope import WireLabel
from share_compute_actors.transport.keys import Peer

_SHORT_TIMEOUT_S = 0.2
"""Timeout in seconds for a handshake on a link known to be dead, and for all handshakes after the first missing one.

While `connect_all` waits for one handshake, the others arrive, so a short timeout is enough for them."""


def connect_all(
    channel: Channel,
    worker: Worker,
    peers: Sequence[Peer],
    dead: Collection[tuple[Worker, Worker]],
    timeout_s: float = 5.0,
) -> list[Worker]:
    """Connect to all other members; return the members whose handshake did not arrive on the direct link.

    Args:
        channel: this member's end of the links.
        worker: this member.
        peers: all members, in the same order at each member.
        dead: pairs of members whose link is known to be dead; the timeout for their handshakes is 0.2 s.
        timeout_s: timeout for other handshakes, in seconds, until the first one is missing.
    """
    unlikely = {other for pair in dead if worker in pair for other in pair}
    others = [peer for peer in peers if peer.worker != worker]
    places = {peer.worker: place for place, peer in enumerate(peers)}
    for peer in others:
        channel.connect(peer)
        channel.send(peer.worker, _hello(places[worker]), torch.zeros(1))
    without_handshake: list[Worker] = []
    for peer in sorted(others, key=lambda peer: peer.worker in unlikely):
        waits = peer.worker not in unlikely and not without_handshake
        try:
            channel.receive(_hello(places[peer.worker]), peer.name, timeout_s if waits else _SHORT_TIMEOUT_S)
        except ContributorLost:
            without_handshake.append(peer.worker)
    return without_handshake


def _hello(place: int) -> WireLabel:
    return WireLabel("train", 0, "hello", place, 0)
