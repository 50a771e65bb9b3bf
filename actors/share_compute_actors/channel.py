"""The one seam through which tensors travel between members.

Two bodies: persistent ZeroMQ sockets between members that reach each other (CURVE keys of the epoch: authenticated and
encrypted), and Ray calls that carry bytes for those that do not. Both end in the same inbox, which drops messages of
other epochs and duplicates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
import zmq
from torch import Tensor
from zmq.auth.thread import ThreadAuthenticator

from share_compute.errors import ContributorLost
from share_compute_actors.messages import Envelope, Label, MemberId, Peer

Deliver = Callable[[bytes, np.ndarray], None]
"""Carries one envelope and its bytes by a Ray call."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair of one member for one epoch, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def issue(cls) -> Keys:
        """Make a new pair."""
        return cls(*zmq.curve_keypair())


class _Admission:
    """Lets in exactly the members of this epoch."""

    def __init__(self, allowed: Iterable[bytes]) -> None:
        self._allowed = frozenset(allowed)

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq calls it so
        return key in self._allowed


class Channel:
    """One member's end of all its links.

    All methods but `deliver` belong to the thread that made it.

    Args:
        job: messages of other jobs are dropped.
        epoch: messages of other epochs are dropped.
        address: IP address to listen at.
        keys: this member's own.
        admitted: public keys of all members.
    """

    def __init__(self, job: str, epoch: int, address: str, keys: Keys, admitted: Iterable[bytes]) -> None:
        self._job = job
        self._epoch = epoch
        self._keys = keys
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_Admission(admitted))
        self._inbound = self._context.socket(zmq.PULL)
        self._inbound.curve_secretkey = keys.secret
        self._inbound.curve_publickey = keys.public
        self._inbound.curve_server = True
        self._inbound.set_hwm(
            0
        )  # the schedule bounds what is in flight; a full queue must not block a sender
        self._inside = "inproc://deliver"
        self._inbound.bind(self._inside)
        host = f"[{address}]" if ":" in address else address
        self._inbound.ipv6 = ":" in address
        port = self._inbound.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._direct: dict[MemberId, zmq.Socket[bytes]] = {}
        self._by_call: dict[MemberId, Deliver] = {}
        self._arrived: dict[Label, Tensor] = {}
        self._taken: set[Label] = set()
        self._inside_sockets = threading.local()
        self.waited_s = 0.0
        """Time spent in `receive`, to be read and reset by the owner."""

    def connect(self, peer: Peer) -> None:
        """Open a direct link to ``peer``; it need not answer yet."""
        socket = self._context.socket(zmq.PUSH)
        socket.curve_secretkey = self._keys.secret
        socket.curve_publickey = self._keys.public
        socket.curve_serverkey = peer.public_key
        socket.ipv6 = "[" in peer.endpoint
        socket.set_hwm(0)
        socket.linger = 0
        socket.connect(peer.endpoint)
        self._direct[peer.me] = socket

    def use_calls(self, member: MemberId, deliver: Deliver) -> None:
        """Send to ``member`` by Ray calls from now on."""
        socket = self._direct.pop(member, None)
        if socket is not None:
            socket.close()
        self._by_call[member] = deliver

    def send(self, member: MemberId, label: Label, tensor: Tensor) -> None:
        """Send a tensor and return at once; it must not be changed afterwards."""
        ready = tensor.detach().to("cpu").contiguous()
        envelope = Envelope(
            self._job, self._epoch, label, str(ready.dtype).removeprefix("torch."), tuple(ready.shape)
        ).pack()
        content = ready.reshape(-1).view(torch.uint8).numpy()
        if member in self._by_call:
            self._by_call[member](envelope, content)
        else:
            self._direct[member].send_multipart([envelope, content.data], copy=False)

    def deliver(self, envelope: bytes, content: np.ndarray) -> None:
        """Take in what came by a Ray call; may be called from any thread."""
        socket = getattr(self._inside_sockets, "socket", None)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.linger = 0
            socket.connect(self._inside)
            self._inside_sockets.socket = socket
        socket.send_multipart([envelope, content.tobytes()])

    def receive(self, label: Label, source: str, timeout_s: float) -> Tensor:
        """Wait for the tensor of that label.

        Args:
            label: as the sender gave it.
            source: who is to send it, for the error.
            timeout_s: longest wait.

        Raises:
            ContributorLost: it did not come in time.
        """
        start = time.perf_counter()
        while label not in self._arrived:
            self._take_in(label, source, start + timeout_s)
        self.waited_s += time.perf_counter() - start
        self._taken.add(label)
        return self._arrived.pop(label)

    def _take_in(self, label: Label, source: str, until: float) -> None:
        left_ms = max(0, round((until - time.perf_counter()) * 1000))
        if not self._inbound.poll(left_ms):
            raise ContributorLost(
                f"{source} sent no {label.cargo} of microbatch {label.microbatch} in time",
                machine=source,
                step=label.step,
                mend="check that machine and its network, then resume the job",
            )
        envelope, content = self._inbound.recv_multipart(copy=False)
        message = Envelope.unpack(envelope.bytes)
        if (message.job, message.epoch) != (self._job, self._epoch):
            return
        if message.label in self._taken or message.label in self._arrived:
            return
        flat = torch.frombuffer(bytearray(content.buffer), dtype=getattr(torch, message.dtype))
        self._arrived[message.label] = flat.reshape(message.shape)

    def forget(self, before: int) -> None:
        """Stop remembering which tensors of training steps before ``before`` were taken."""
        self._taken = {label for label in self._taken if label.phase == "train" and label.step >= before}

    def close(self) -> None:
        """Close all links."""
        for socket in self._direct.values():
            socket.close()
        self._inbound.close(linger=0)
        self._authenticator.stop()
        self._context.destroy(linger=0)
