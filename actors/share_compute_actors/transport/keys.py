"""Keys and endpoints of channels, in the form that members report.

This module does not import torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import zmq

from share_compute.protocol.membership import Worker
from share_compute_actors.wire import Schema


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair of one member for one epoch, as Z85 text (the encoding of ZeroMQ)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def issue(cls) -> Keys:
        """Return a new key pair."""
        return cls(*zmq.curve_keypair())

    def call_key(self, source: Worker) -> bytes:
        """Return the secret that ``source`` must send with each Ray call to the owner of this key pair."""
        return hashlib.blake2b(source.encode(), key=self.secret, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Peer:
    """The endpoint of a member and its public key."""

    worker: Worker
    name: str
    endpoint: str
    public_key: bytes


PEER: Schema[Peer] = Schema(Peer)
WORKERS: Schema[list[Worker]] = Schema(list[Worker])
