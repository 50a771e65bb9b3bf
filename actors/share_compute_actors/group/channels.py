"""Opens the channels of an epoch between members: direct links, or Ray calls where direct links do not work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from share_compute.errors import ContributorLost
from share_compute.protocol.membership import Worker
from share_compute_actors.group.worker_group import WorkerGroup
from share_compute_actors.transport.keys import PEER, WORKERS, Keys
from share_compute_actors.wire import NOTHING

Wanted = Literal["auto", "direct", "ray"]
"""Requested transport of tensors: direct links where they work ("auto"), direct links only, or Ray calls only."""


def open_channels(
    group: WorkerGroup, epoch: int, workers: Collection[Worker], wanted: Wanted, note: Callable[[str], None]
) -> bool:
    """Make members connect to each other with new keys for this epoch; return whether all links are direct.

    Args:
        group: the group that the members belong to.
        epoch: number of the epoch that is about to begin.
        workers: the members.
        wanted: requested transport of tensors.
        note: called with each message for the log.

    Raises:
        Cancelled: the job was cancelled, or the replica was stopped.
        MembersLost: members died, became unresponsive or sent invalid data.
        ContributorLost: `wanted` is ``direct``, and a direct link does not work.
        StaleEpoch: a later epoch has begun, or a message was lost in transit.
    """
    keys = {worker: Keys.issue() for worker in workers}
    admitted = {pair.public: worker for worker, pair in keys.items()}
    peers = group.gather(
        PEER,
        {worker: group.handle(worker).listen.remote(epoch, keys[worker], admitted) for worker in workers},
    )
    for worker, peer in peers.items():
        if (peer.worker, peer.public_key) != (worker, keys[worker].public):
            group.accuse(worker, "an end of a channel that is not its own")
    without_handshake = group.ask(WORKERS, workers, "connect", list(peers.values()), group.topology.cut_off)
    for worker, sources in without_handshake.items():
        if not without_handshake.keys() >= set(sources):
            group.accuse(worker, "members that are not there")
    by_calls = _by_calls(without_handshake, wanted)
    if by_calls and wanted == "direct":
        lost = sorted({group.name(source) for source in by_calls})
        raise ContributorLost(
            f"no direct link from {', '.join(lost)}",
            machine=lost[0],
            hint="open the ports between these machines, or use parallelism.channel: auto",
        )
    if by_calls:
        links = sum(len(targets) for targets in by_calls.values())
        note(f"{links} links go by Ray calls" + ("" if wanted == "ray" else ": no direct way"))
    group.gather(
        NOTHING,
        {
            worker: group.handle(worker).use_calls.remote(
                {target: (group.handle(target), keys[target].call_key(worker)) for target in targets}
            )
            for worker, targets in by_calls.items()
        },
    )
    return not by_calls


def _by_calls(
    without_handshake: Mapping[Worker, Sequence[Worker]], wanted: Wanted
) -> dict[Worker, list[Worker]]:
    """Return the receivers to which each member sends by Ray calls, by sender.

    A link uses Ray calls if the handshake on it did not arrive. If Ray calls are requested, all links use them.

    Args:
        without_handshake: for each receiver, the senders whose handshake did not arrive; every member has an entry.
        wanted: requested transport of tensors.
    """
    found: dict[Worker, list[Worker]] = {}
    for worker, sources in without_handshake.items():
        for source in without_handshake if wanted == "ray" else sources:
            if source != worker:
                found.setdefault(source, []).append(worker)
    return found
