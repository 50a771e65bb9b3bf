"""The methods of a member that open its links to the other members.

Processes that call members import this module. To keep this import fast, only the methods import torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

from share_compute.errors import ShareComputeError
from share_compute.protocol.membership import Worker
from share_compute_actors.group.answering import answers
from share_compute_actors.transport.keys import PEER, WORKERS, Keys, Peer
from share_compute_actors.wire import NOTHING

if TYPE_CHECKING:
    from share_compute_actors.group.compute_thread import ComputeThread
    from share_compute_actors.transport.channel import Channel
    from share_compute_actors.transport.traffic import Traffic


_log = logging.getLogger(__name__)


class LinkSetup(Protocol):
    """The parameters of a member that `LinkedMember` reads."""

    @property
    def worker(self) -> Worker:
        """Id of the contributor that the member runs on. It identifies the member in its group."""

    @property
    def name(self) -> str:
        """Name of the member's machine, for display."""

    @property
    def address(self) -> str:
        """IP address at which the other members reach this member."""

    @property
    def scope(self) -> str:
        """Id of the job, or of the deployment's replica; tensors with another id are dropped."""


class LinkedMember:
    """Mixin with a member's methods for its links. `open_channels` calls them."""

    _setup: LinkSetup
    _engine: ComputeThread
    _traffic: Traffic | None = None
    """Counts and limits the member's transfers; None for neither."""
    _names: dict[Worker, str]
    """Name of each member's machine in this epoch, by member."""
    _last_message_s: float
    """Time limit for the last message of a member that ends itself, in seconds."""

    def _report_loss(self, lost: ShareComputeError) -> Any:
        """Send an error to the process that leads the member, and return the answer's reference."""
        raise NotImplementedError

    def _end(self, lost: ShareComputeError) -> None:
        """End this process, because its device or a rank was lost; the error is sent first, if it is answered.

        On GPUs, this also happens after another rank lacked memory: a sum with it would block this process.
        """
        _log.error("%s exits: %s", self._setup.name, lost.message)
        try:
            ray.wait([self._report_loss(lost)], timeout=self._last_message_s)
        finally:
            os._exit(1)

    @ray.method(concurrency_group="orders")
    @answers(PEER)
    def listen(self, epoch: int, keys: Keys, admitted: Mapping[bytes, Worker]) -> Peer:
        """Open this member's channel for an epoch, and return its endpoint and public key.

        Args:
            epoch: number of the epoch.
            keys: keys of this member for the epoch.
            admitted: all members of the epoch, by public key.
        """
        return self._engine.order(partial(self._listen, epoch, keys, admitted))

    def _listen(self, epoch: int, keys: Keys, admitted: Mapping[bytes, Worker]) -> Peer:
        from share_compute_actors.transport.channel import Channel  # noqa: PLC0415 - loads torch

        setup = self._setup
        channel = Channel(setup.worker, setup.scope, epoch, setup.address, keys, admitted, self._traffic)
        self._engine.open(channel)
        return Peer(setup.worker, setup.name, channel.endpoint, keys.public)

    @ray.method(concurrency_group="orders")
    @answers(WORKERS)
    def connect(self, peers: Sequence[Peer], dead: Collection[tuple[Worker, Worker]]) -> list[Worker]:
        """Connect to all other members, and return the members whose handshake did not arrive by the direct link.

        Args:
            peers: all members, in the same order on each of them.
            dead: pairs of members whose link is known to be dead.
        """
        return self._engine.order(partial(self._connect, peers, dead))

    def _connect(self, peers: Sequence[Peer], dead: Collection[tuple[Worker, Worker]]) -> list[Worker]:
        from share_compute_actors.transport.handshakes import connect_all  # noqa: PLC0415 - loads torch

        self._names = {peer.worker: peer.name for peer in peers}
        return connect_all(self._open_channel(), self._setup.worker, peers, dead)

    @ray.method(concurrency_group="orders")
    @answers(NOTHING)
    def use_calls(self, members: Mapping[Worker, tuple[Any, bytes]]) -> None:
        """From now on, send to these members by Ray calls instead of over direct links.

        Args:
            members: each receiver's actor, and the key that this member passes with calls to it, by receiver.
        """
        for member, (handle, key) in members.items():
            deliver = partial(handle.deliver.remote, self._setup.worker, key)
            self._engine.order(partial(self._open_channel().use_calls, member, deliver))

    @ray.method(concurrency_group="mail")
    def deliver(self, source: Worker, key: bytes, envelope: bytes, content: NDArray[np.uint8]) -> None:
        """Receive a tensor that another member sent by a Ray call."""
        self._open_channel().deliver(source, key, envelope, content)

    def _open_channel(self) -> Channel:
        assert self._engine.channel is not None
        return self._engine.channel
