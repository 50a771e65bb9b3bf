"""The channel: carries tensors between members while they compute.

Collective operations and the loading of shards do not use the channel.

The channel has two transports. Members that can reach each other use persistent ZeroMQ sockets, authenticated and
encrypted with CURVE keys of the epoch. Other members use Ray calls that carry bytes. Messages of both transports arrive
in one inbox. The inbox drops messages of other epochs, duplicates, and damaged messages.

The inbox identifies a message's sender by the sender's CURVE public key or, in a Ray call, by its secret key
(`Keys.call_key`). If an envelope names another sender, the inbox rejects the message, and the real sender is at fault.

The channel never repeats a message. When a connection breaks, ZeroMQ loses the messages in flight. So the channel
counts the tensors that it sends over each socket, and reports the counts in handshakes. A receiver detects lost tensors
by these counts (`Channel.lacks`), and members repeat the work in the next epoch. Ray calls are not counted: each one
arrives, or its receiver is lost.
"""

from __future__ import annotations

import logging
import math
import secrets
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor
from zmq.auth.thread import ThreadAuthenticator

from share_compute.errors import ContributorLost, StaleEpoch, Unavailable, VerificationFailed, WrongTensor
from share_compute.protocol.membership import Worker
from share_compute_actors.machine.ports import channel_ports
from share_compute_actors.transport.arrivals import Arrivals
from share_compute_actors.transport.envelope import Envelope, Phase, WireLabel
from share_compute_actors.transport.keys import Keys, Peer
from share_compute_actors.transport.traffic import Traffic

_log = logging.getLogger(__name__)

_POLL_S = 1.0
"""Longest wait before the next check for lost messages, in seconds."""
HANDSHAKE = WireLabel("train", 0, "hello", -1, 0)
"""Label of a handshake that reports the number of tensors sent; no receiver waits for it."""

Deliver = Callable[[bytes, np.ndarray], None]
"""A function that sends an envelope and the tensor's bytes by a Ray call."""


class EncodedTensor(NamedTuple):
    """A tensor, encoded for sending."""

    envelope: bytes
    content: np.ndarray

    def damaged(self) -> EncodedTensor:
        """Return a copy with one flipped bit, as defective memory or a defective network would produce it."""
        content = self.content.copy()
        content[len(content) // 2] ^= 1
        return EncodedTensor(self.envelope, content)

    def shortened(self) -> EncodedTensor:
        """Return a copy without the last byte but with a valid checksum, as a defective sender would produce it."""
        envelope, content = Envelope.unpack(self.envelope, self.content.data), self.content[:-1]
        return EncodedTensor(envelope.pack(content.data), content)


_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
"""Dtypes that received tensors may have, by name. torch cannot read other dtypes; quantized dtypes even crash it."""


class RejectedTensor(NamedTuple):
    """An undamaged message that has no valid tensor, or names a wrong sender. Its real sender is at fault."""

    label: WireLabel
    source: Worker
    """The member that sent the message, as identified by its key."""
    what: str
    """Defect of the message, for display."""


class _Admission:
    """Admits only connections that authenticate with the public key of a member of this epoch."""

    def __init__(self, allowed: Collection[bytes]) -> None:
        self._allowed = allowed

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - pyzmq passes it
        return key in self._allowed


class Channel:
    """One member's end of all its links in one epoch.

    Only the thread that created the channel may call its methods, except for `deliver`, `wake` and `interrupt`.

    Args:
        worker: the member at this end.
        job: id of the job or of the deployment's replica; messages with another id are dropped.
        epoch: epoch number; messages of other epochs are dropped.
        address: IP address on which the channel listens.
        keys: this member's own keys.
        admitted: all members, by public key.
        traffic: counts sent and received bytes, and limits sent bytes; None for neither.
    """

    def __init__(
        self,
        worker: Worker,
        job: str,
        epoch: int,
        address: str,
        keys: Keys,
        admitted: Mapping[bytes, Worker],
        traffic: Traffic | None = None,
    ) -> None:
        self._traffic = traffic
        self._worker = worker
        self._job = job
        self.epoch = epoch
        self._keys = keys
        self._admitted = admitted
        self._peers: dict[Worker, Peer] = {}
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_Admission(admitted))
        self._inbound = self._context.socket(zmq.PULL)
        self._inbound.curve_secretkey = keys.secret
        self._inbound.curve_publickey = keys.public
        self._inbound.curve_server = True
        # Without a high-water mark, queues never block a sender. The schedule already bounds the tensors in flight.
        self._inbound.set_hwm(0)
        self._inside = "inproc://deliver"
        self._inbound.bind(self._inside)
        host = f"[{address}]" if ":" in address else address
        self._inbound.ipv6 = ":" in address
        port = _bind(self._inbound, host)
        self.endpoint = f"tcp://{host}:{port}"
        self._direct: dict[Worker, zmq.Socket[bytes]] = {}
        self._by_call: dict[Worker, Deliver] = {}
        self._arrived: dict[WireLabel, Tensor] = {}
        self._sources: dict[WireLabel, Worker] = {}
        """Sender of each tensor in `_arrived`."""
        self.rejected: deque[RejectedTensor] = deque()
        """Rejected messages of this epoch, until the member handles them."""
        self._taken: set[WireLabel] = set()
        self._sent: Counter[Worker] = Counter()
        self._came: defaultdict[Worker, Arrivals] = defaultdict(Arrivals)
        self.is_cut: Callable[[Worker], bool] = lambda _: False
        """For fault injection: a function that returns whether the link to a member is cut."""
        self.damaged = 0
        """Number of messages that were dropped because they arrived damaged."""
        self._inside_lock = threading.Lock()
        self._inside_socket: zmq.Socket[bytes] | None = None
        self._is_closed = False
        self._is_interrupted = False

    def connect(self, peer: Peer) -> None:
        """Open a direct link to ``peer``, without waiting for an answer."""
        socket = self._context.socket(zmq.PUSH)
        socket.curve_secretkey = self._keys.secret
        socket.curve_publickey = self._keys.public
        socket.curve_serverkey = peer.public_key
        socket.ipv6 = "[" in peer.endpoint
        socket.set_hwm(0)
        socket.linger = 0
        socket.connect(peer.endpoint)
        self._direct[peer.worker] = socket
        self._peers[peer.worker] = peer

    def use_calls(self, worker: Worker, deliver: Deliver) -> None:
        """Send to ``worker`` by Ray calls from now on."""
        socket = self._direct.pop(worker, None)
        if socket is not None:
            socket.close()
        self._by_call[worker] = deliver

    def send(self, worker: Worker, label: WireLabel, tensor: Tensor) -> None:
        """Send a tensor as `post` does; the tensor must not change afterwards."""
        self.post(worker, self.write(worker, label, tensor))

    def write(self, worker: Worker, label: WireLabel, tensor: Tensor) -> EncodedTensor:
        """Encode a tensor for ``worker``, and count it as sent if the link is direct.

        Handshakes are not counted.
        """
        ready = tensor.detach().to("cpu").contiguous()
        if worker in self._direct and label.cargo != "hello":
            self._sent[worker] += 1
        content = ready.reshape(-1).view(torch.uint8).numpy()
        envelope = Envelope(
            job=self._job,
            epoch=self.epoch,
            label=label,
            dtype=str(ready.dtype).removeprefix("torch."),
            shape=tuple(ready.shape),
            source=self._worker,
            number=self._sent[worker],
        )
        return EncodedTensor(envelope.pack(content.data), content)

    def post(self, worker: Worker, encoded: EncodedTensor) -> None:
        """Send a tensor that `write` prepared; return at once, or when the upload rate allows the transfer."""
        if self.is_cut(worker):
            return
        if self._traffic is not None:
            self._traffic.send(encoded.content.nbytes)
        if worker in self._by_call:
            self._by_call[worker](encoded.envelope, encoded.content)
            return
        frames: list[bytes | memoryview] = [encoded.envelope, encoded.content.data]
        try:
            self._direct[worker].send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            # ZeroMQ gives up a connection if another program answers, for example at the port of a dead member. A
            # blocking send would then wait forever, so the link is reopened. A living receiver detects the lost tensors
            # by the next count from `report_sent`.
            self._direct[worker].close()
            self.connect(self._peers[worker])
            self._direct[worker].send_multipart(frames, zmq.NOBLOCK, copy=False)

    def report_sent(self) -> None:
        """Send each receiver on a direct link the number of tensors sent to it, so that it can detect losses."""
        for worker in self._direct.keys() & +self._sent:
            self.send(worker, HANDSHAKE, torch.zeros(1))

    def lacks(self) -> bool:
        """Return whether a tensor that was sent to this member in this epoch was lost or damaged in transit."""
        now_s = time.monotonic()
        return bool(self.damaged) or any(arrivals.lack(now_s) for arrivals in self._came.values())

    def deliver(self, source: Worker, key: bytes, envelope: bytes, content: np.ndarray) -> None:
        """Receive a message that ``source`` sent by a Ray call; may be called from any thread.

        The message is dropped if ``key`` is not `Keys.call_key` of ``source``.
        """
        if secrets.compare_digest(self._keys.call_key(source), key):
            self._put_inside([envelope, content.tobytes(), source.encode()])

    def wake(self) -> None:
        """Make `take` return at once; may be called from any thread."""
        self._put_inside([b""])

    def interrupt(self) -> None:
        """Make `receive` raise `StaleEpoch` instead of waiting, in current and later calls. Thread-safe."""
        self._is_interrupted = True
        self.wake()

    def _put_inside(self, frames: list[bytes]) -> None:
        with self._inside_lock:
            if self._is_closed:
                return
            if self._inside_socket is None:
                self._inside_socket = self._context.socket(zmq.PUSH)
                self._inside_socket.linger = 0
                self._inside_socket.connect(self._inside)
            self._inside_socket.send_multipart(frames)

    def take(self, timeout_s: float) -> tuple[WireLabel, Worker, Tensor] | None:
        """Remove and return the next tensor of a training step, as (label, sender, tensor).

        Return None after ``timeout_s`` seconds, after a call of `wake`, or after the arrival of any other message.
        Tensors that do not belong to a training step are kept for `receive`.
        """
        label = next((label for label in self._arrived if label.is_of_step), None)
        if label is None:
            label = self._take_in(timeout_s)
            if label is None or not label.is_of_step:
                return None
        self._taken.add(label)
        return label, self._sources.pop(label), self._arrived.pop(label)

    def receive(self, label: WireLabel, source: str, timeout_s: float) -> Tensor:
        """Wait for the tensor with this label, and return it.

        Args:
            label: the label, exactly as the sender gave it.
            source: name of the expected sender, for the error.
            timeout_s: longest wait, in seconds.

        Raises:
            ContributorLost: the tensor did not arrive in time.
            StaleEpoch: `interrupt` was called, or a tensor was lost in transit.
            WrongTensor: the tensor arrived, but cannot be read.
        """
        start = time.perf_counter()
        while label not in self._arrived:
            if self._is_interrupted:
                raise StaleEpoch(
                    f"epoch {self.epoch} is over", hint="no action needed: the next epoch begins"
                )
            for rejected in self.rejected:
                if rejected.label == label:
                    peer = self._peers.get(rejected.source)
                    name = rejected.source if peer is None else peer.name
                    raise WrongTensor.of(name, rejected.source, rejected.what, label.step)
            if self.lacks():
                raise StaleEpoch(
                    f"a tensor for {self._worker} was lost in transit",
                    hint="no action needed: the next epoch begins",
                )
            left_s = start + timeout_s - time.perf_counter()
            if left_s <= 0:
                raise ContributorLost(
                    f"{source} sent no {label.cargo} of microbatch {label.microbatch} in time",
                    machine=source,
                    step=label.step,
                    hint="check that machine and its network, then resume the job",
                )
            self._take_in(min(left_s, _POLL_S))
        self._taken.add(label)
        del self._sources[label]
        return self._arrived.pop(label)

    def _take_in(self, timeout_s: float) -> WireLabel | None:
        """Wait for one message. If its tensor is valid, new and of this epoch, store the tensor and return the label.

        Otherwise return None.
        """
        if not self._inbound.poll(max(0, round(timeout_s * 1000))):
            return None
        frames = self._inbound.recv_multipart(copy=False)
        if len(frames) == 1:  # from `wake`
            return None
        content = frames[1].buffer
        if self._traffic is not None:
            self._traffic.count(received=len(content))  # the sender's upload rate limits it
        message = self._open(frames[0].bytes, content, self._sender(frames))
        if message is None:
            return None
        tensor = _tensor(message, content)
        if isinstance(tensor, str):
            self.rejected.append(RejectedTensor(message.label, message.source, tensor))
            return None
        self._arrived[message.label], self._sources[message.label] = tensor, message.source
        return message.label

    def _sender(self, frames: Sequence[zmq.Frame]) -> Worker:
        """Return the sender of a message, identified by its public key or, for a Ray call, by `deliver`."""
        try:
            key = str(frames[0].get("User-Id"))
        except zmq.ZMQError:  # only messages from `deliver` have no key
            return frames[2].bytes.decode()
        return self._admitted[key.encode()]

    def _open(self, data: bytes, content: memoryview, sender: Worker) -> Envelope | None:
        """Return the envelope of a message; None if the message is to be dropped.

        A message is dropped if it is damaged, of another job or epoch, a duplicate, or not from ``sender``. Messages
        with the label `HANDSHAKE` are dropped after their count has been recorded.
        """
        try:
            message = Envelope.unpack(data, content)
        except VerificationFailed as failure:
            self.damaged += 1
            _log.warning("%s: %s", self._worker, failure.message)
            return None
        except (ValueError, TypeError, struct.error) as failure:
            self.damaged += 1
            _log.warning("%s: an envelope cannot be read: %s", self._worker, failure)
            return None
        if message.source != sender:
            what = f"its {message.label.cargo} names {message.source or 'nobody'} as the sender"
            self.rejected.append(RejectedTensor(message.label, sender, what))
            _log.warning("%s: a message of %s was dropped: %s", self._worker, sender, what)
            return None
        if (message.job, message.epoch) != (self._job, self.epoch) or self.is_cut(message.source):
            return None
        if message.number:
            self._count(message)
        is_known = message.label in self._taken or message.label in self._arrived
        return None if is_known or message.label == HANDSHAKE else message

    def _count(self, message: Envelope) -> None:
        came, now_s = self._came[message.source], time.monotonic()
        if message.label.cargo == "hello":
            came.expect(message.number, now_s)
        else:
            came.came(message.number, now_s)

    def forget(self, before: int, phase: Phase = "train") -> None:
        """Forget the labels of taken tensors, to bound memory; keep those of ``phase`` from step ``before`` on."""
        self._taken = {label for label in self._taken if label.phase == phase and label.step >= before}

    def forget_evaluations(self) -> None:
        """Forget the labels of taken tensors in all phases other than training."""
        self._taken = {label for label in self._taken if label.phase == "train"}

    def close(self) -> None:
        """Close all links."""
        with self._inside_lock:
            self._is_closed = True
            if self._inside_socket is not None:
                self._inside_socket.close(linger=0)
        for socket in self._direct.values():
            socket.close()
        self._inbound.close(linger=0)
        self._authenticator.stop()
        self._context.destroy(linger=0)


def _bind(inbound: zmq.Socket[bytes], host: str) -> int:
    """Bind a socket to a free channel port of this machine, and return the port.

    Raises:
        Unavailable: all ports are taken.
    """
    known = channel_ports()
    if known is None:
        return inbound.bind_to_random_port(f"tcp://{host}")
    for port in range(known.first, known.last + 1):
        try:
            inbound.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as failure:
            if failure.errno != zmq.EADDRINUSE:
                raise
        else:
            return port
    raise Unavailable(
        f"all TCP ports for channels of this machine ({known}) are taken",
        hint="end jobs or deployments that use this machine, or let it join again",
    )


def _tensor(message: Envelope, content: memoryview) -> Tensor | str:
    """Return the tensor that an envelope describes; if the message has no valid tensor, return the defect as text."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        return f"its dtype {message.dtype!r} is none"
    if min(message.shape, default=1) < 0 or math.prod(message.shape) * dtype.itemsize != len(content):
        return f"it has {len(content)} bytes, which are no {message.dtype} of shape {list(message.shape)}"
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if len(content) else torch.empty(0, dtype=dtype)
    try:
        return flat.reshape(message.shape)
    except RuntimeError:  # an empty tensor may have one dimension that is too large for torch
        return f"no {message.dtype} has shape {list(message.shape)}"
