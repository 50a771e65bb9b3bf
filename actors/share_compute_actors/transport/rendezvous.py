"""A torch ``Store`` for the members of a process group; it sends its values over the epoch's channel.

torch's own ``TCPStore`` looks up the name of each address that it connects to, even of numeric addresses
(``formatSockAddr`` in ``c10d/socket.cpp``). With glibc's defaults each lookup takes 10 s if no resolver answers. This
store looks up no names, and needs neither a port nor a server.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import xxhash

from share_compute.errors import ContributorLost
from share_compute.protocol.collectives import Algorithm
from share_compute.protocol.membership import Worker
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.envelope import WireLabel

dist: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Data that one member of a stage needs to form the stage's process group."""

    group: str
    """Name of the group, unique for each job, epoch and stage."""
    members: tuple[Worker, ...]
    timeout_s: float
    address: str = ""
    """IP address at which the other members reach this member."""
    algorithm: Algorithm | Literal["auto"] = "auto"
    """Algorithm of sums on CPUs. On GPUs, NCCL exchanges the tensors directly.

    "auto" is for sums outside a plan: "sharded" in the order of the summation tree, otherwise "tree" for small tensors
    and gloo's "ring" for others. "hierarchical" applies only to sums in the order of the summation tree."""
    sites: tuple[int, ...] = ()
    """Number of the site of each member; empty if all are at one site."""


class ChannelStore(dist.Store):  # type: ignore[misc]
    """A torch ``Store`` for one group, in which each key is set once, by one member.

    Only the thread that created the store and the channel may call `get` and `wait`. If an operation fails, NCCL's own
    threads set values. The store does not send these values, because the coordinator notifies members of losses.

    Args:
        channel: this member's end of the epoch's channel, which links all members of the group.
        me: this member.
        meeting: the group's members and timeout.
    """

    def __init__(self, channel: Channel, me: Worker, meeting: Rendezvous) -> None:
        super().__init__()
        self._channel = channel
        self._others = [worker for worker in meeting.members if worker != me]
        self._meeting = meeting
        self._known: dict[str, bytes] = {}
        self._thread = threading.get_ident()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key, and send its value to all other members of the group.

        If a thread other than the one that created the store calls this method, the value is kept, but not sent.
        """
        content = value.encode() if isinstance(value, str) else value
        self._known[key] = content
        if threading.get_ident() != self._thread:
            return
        tensor = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        for worker in self._others:
            self._channel.send(worker, self._label(key), tensor)

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value.

        Raises:
            ContributorLost: no member set the key in time.
            StaleEpoch: the channel was interrupted, or lost a message.
        """
        self.wait([key], timedelta(seconds=self._meeting.timeout_s))
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all ``keys`` are set.

        Raises:
            ContributorLost: no member set a key in time.
            StaleEpoch: the channel was interrupted, or lost a message.
        """
        for key in keys:
            if key in self._known:
                continue
            try:
                value = self._channel.receive(self._label(key), "a member", timeout.total_seconds())
            except ContributorLost as failure:
                raise ContributorLost(
                    f"group {self._meeting.group} could not form: a member did not connect in time",
                    hint="check that these machines reach each other, then resume the job",
                ) from failure
            self._known[key] = value.numpy().tobytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether this member knows all ``keys``."""
        return all(key in self._known for key in keys)

    def _label(self, key: str) -> WireLabel:
        """Return the label under which all members send and receive the value of ``key``."""
        number = xxhash.xxh3_64_intdigest(f"{self._meeting.group}/{key}".encode()) % 2**53
        return WireLabel("form", 0, "key", number, 0)
