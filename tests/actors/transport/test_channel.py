"""The channel between members: tensors arrive once; messages of strangers and old epochs are refused."""

import itertools
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from socket import create_server
from typing import Any

import pytest
import torch
import xxhash
import zmq
from tests.conftest import wait_for

from share_compute.errors import ContributorLost, StaleEpoch, VerificationFailed, WrongTensor
from share_compute_actors.transport.arrivals import Arrivals
from share_compute_actors.transport.channel import Channel, EncodedTensor
from share_compute_actors.transport.envelope import WIRE_VERSION, Envelope, WireLabel
from share_compute_actors.transport.handshakes import connect_all
from share_compute_actors.transport.keys import Keys, Peer

ANN, BOB, CARL = "c-ann", "c-bob", "c-carl"
KEYS = {worker: Keys.issue() for worker in (ANN, BOB)}
Pair = Callable[..., tuple[Channel, Channel]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    opened: list[Channel] = []

    def open_pair(epoch_of_ann: int = 1, epoch_of_bob: int = 1) -> tuple[Channel, Channel]:
        admitted = {KEYS[worker].public: worker for worker in (ANN, BOB)}
        ann = Channel(ANN, "job", epoch_of_ann, "127.0.0.1", KEYS[ANN], admitted)
        bob = Channel(BOB, "job", epoch_of_bob, "127.0.0.1", KEYS[BOB], admitted)
        opened.extend((ann, bob))
        ann.connect(Peer(BOB, "bob", bob.endpoint, KEYS[BOB].public))
        bob.connect(Peer(ANN, "ann", ann.endpoint, KEYS[ANN].public))
        return ann, bob

    yield open_pair
    for channel in opened:
        channel.close()


def label(step: int = 1, microbatch: int = 0) -> WireLabel:
    return WireLabel("train", step, "activation", microbatch, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_arrive_as_they_were_sent_in_any_order(pair: Pair, dtype: torch.dtype) -> None:
    ann, bob = pair()
    sent = {microbatch: torch.randn(3, 4, 5).to(dtype) for microbatch in range(4)}
    for microbatch, tensor in sent.items():
        ann.send(BOB, label(microbatch=microbatch), tensor)
    for microbatch in reversed(sent):
        assert torch.equal(bob.receive(label(microbatch=microbatch), "ann", 60.0), sent[microbatch])


def test_a_link_that_is_known_to_be_dead_is_not_waited_for() -> None:
    keys = {worker: Keys.issue() for worker in (ANN, BOB, CARL)}
    admitted = {pair.public: worker for worker, pair in keys.items()}
    with ExitStack() as stack:
        ann, bob = (Channel(worker, "job", 1, "127.0.0.1", keys[worker], admitted) for worker in (ANN, BOB))
        stack.callback(ann.close)
        stack.callback(bob.close)
        ends = {ANN: ann.endpoint, BOB: bob.endpoint, CARL: "tcp://127.0.0.1:9"}
        peers = [Peer(worker, worker, end, keys[worker].public) for worker, end in ends.items()]
        longer_than_a_test_s = 3600.0
        with ThreadPoolExecutor() as threads:
            # The link between Ann and Bob works again: Bob's handshake counts, although Bob takes the link for dead.
            of_bob = threads.submit(
                connect_all, bob, BOB, peers, [(BOB, CARL), (ANN, BOB)], longer_than_a_test_s
            )
            assert connect_all(ann, ANN, peers, [(BOB, CARL), (ANN, CARL)], longer_than_a_test_s) == [CARL]
            assert of_bob.result() == [CARL]


def test_a_tensor_without_dimension_arrives(pair: Pair) -> None:
    ann, bob = pair()
    ann.send(BOB, label(), torch.tensor(2.5, dtype=torch.float64))
    assert bob.receive(label(), "ann", 60.0).item() == 2.5


def test_duplicates_are_dropped(pair: Pair) -> None:
    ann, bob = pair()
    for value in (1.0, 2.0):
        ann.send(BOB, label(), torch.full((1,), value))
    assert bob.receive(label(), "ann", 60.0).item() == 1.0
    ann.send(BOB, label(), torch.full((1,), 3.0))
    ann.send(BOB, label(step=2), torch.full((1,), 4.0))
    assert bob.receive(label(step=2), "ann", 60.0).item() == 4.0
    with pytest.raises(ContributorLost):
        bob.receive(label(), "ann", 0.1)


def test_other_epochs_are_dropped(pair: Pair) -> None:
    old, bob = pair(epoch_of_ann=0)
    old.send(BOB, label(), torch.ones(1))
    with pytest.raises(ContributorLost, match="ann sent no activation of microbatch 0 in time") as caught:
        bob.receive(label(), "ann", 0.3)
    assert caught.value.machine == "ann"


def test_strangers_do_not_get_in(pair: Pair) -> None:
    _, bob = pair()
    context = zmq.Context()
    plain = context.socket(zmq.PUSH)
    plain.connect(bob.endpoint)
    stranger = context.socket(zmq.PUSH)
    mine = Keys.issue()
    stranger.curve_publickey, stranger.curve_secretkey = mine.public, mine.secret
    stranger.curve_serverkey = KEYS[BOB].public
    stranger.connect(bob.endpoint)
    envelope = Envelope("job", 1, label(), "float32", (1,)).pack(b"\0\0\0\0")
    for socket in (plain, stranger):
        socket.send_multipart([envelope, b"\0\0\0\0"], flags=zmq.NOBLOCK if socket is stranger else 0)
    with pytest.raises(ContributorLost):
        bob.receive(label(), "ann", 0.5)
    context.destroy(linger=0)


def test_another_program_at_the_port_of_a_member_blocks_no_sender() -> None:
    keys_of_ann, keys_of_bob = Keys.issue(), Keys.issue()
    context = zmq.Context()
    bob = context.socket(zmq.PULL)
    bob.curve_secretkey, bob.curve_publickey, bob.curve_server = keys_of_bob.secret, keys_of_bob.public, True
    ann = Channel(ANN, "job", 1, "127.0.0.1", keys_of_ann, {keys_of_bob.public: BOB})
    steps = itertools.count(1)
    with create_server(("127.0.0.1", 0)) as program:
        endpoint = f"tcp://127.0.0.1:{program.getsockname()[1]}"
        program.settimeout(0.1)
        ann.connect(Peer(BOB, "bob", endpoint, keys_of_bob.public))

        def answer_in_another_protocol() -> bool:
            sending = threading.Thread(
                target=ann.send, args=(BOB, label(step=next(steps)), torch.ones(1)), daemon=True
            )
            sending.start()
            sending.join(60.0)
            assert not sending.is_alive()
            try:
                connection, _ = program.accept()
            except TimeoutError:
                return False
            connection.settimeout(60.0)
            with connection, suppress(ConnectionResetError):
                connection.sendall(b"HTTP/1.1 400 Bad Request" + bytes(64))
                while connection.recv(4096):
                    pass
            return True

        for _ in range(3):  # the second and third time, the link was closed and opened again
            wait_for(answer_in_another_protocol, "a connection")
    bob.bind(endpoint)

    def is_received() -> bool:
        ann.send(BOB, label(step=next(steps)), torch.ones(1))
        return bob.poll(100) == zmq.POLLIN

    wait_for(is_received, "a tensor")
    ann.close()
    bob.close(linger=0)
    context.term()


def test_ray_calls_end_in_the_same_inbox(pair: Pair) -> None:
    ann, bob = pair()
    ann.use_calls(BOB, partial(bob.deliver, ANN, KEYS[BOB].call_key(ANN)))
    tensor = torch.randn(2, 3)
    ann.send(BOB, label(), tensor)
    assert torch.equal(bob.receive(label(), "ann", 60.0), tensor)


def forged(ann: Channel) -> EncodedTensor:
    """Return a message that ann seals in the name of another member."""
    encoded = ann.write(BOB, label(), torch.zeros(2))
    envelope = replace(Envelope.unpack(encoded.envelope, encoded.content.data), source=CARL)
    return encoded._replace(envelope=envelope.pack(encoded.content.data))


def test_a_message_in_the_name_of_another_is_dropped_and_held_against_the_owner_of_the_key(
    pair: Pair,
) -> None:
    ann, bob = pair()
    ann.post(BOB, forged(ann))
    assert bob.take(60.0) is None
    assert list(bob.rejected) == [(label(), ANN, "its activation names c-carl as the sender")]
    ann.send(BOB, label(), torch.ones(2))  # the forged message does not count as the true one
    taken = bob.take(60.0)
    assert taken is not None
    assert (taken[1], taken[2].tolist()) == (ANN, [1.0, 1.0])


def test_who_waits_for_what_another_forges_names_the_forger(pair: Pair) -> None:
    ann, bob = pair()
    ann.post(BOB, forged(ann))
    with pytest.raises(WrongTensor, match="ann sent a wrong tensor: its activation names") as found:
        bob.receive(label(), "carl", 60.0)
    assert found.value.worker == ANN


def test_a_ray_call_shows_the_key_of_its_sender(pair: Pair) -> None:
    ann, bob = pair()
    encoded, key = forged(ann), KEYS[BOB].call_key(ANN)
    bob.deliver(CARL, key, *encoded)  # Carl is named as the sender in both places, but the key is Ann's
    bob.deliver(CARL, KEYS[ANN].call_key(CARL), *encoded)
    bob.deliver(ANN, key, *encoded)
    assert bob.take(60.0) is None
    assert [each.source for each in bob.rejected] == [ANN]
    bob.deliver(ANN, key, *ann.write(BOB, label(), torch.ones(2)))
    taken = bob.take(60.0)
    assert taken is not None
    assert taken[1] == ANN


def test_an_envelope_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 9"):
        Envelope.unpack(b"\x09[]", b"")


def test_an_envelope_fits_no_other_content_and_no_content_another_envelope() -> None:
    content = bytes(range(64))
    envelope = Envelope("job", 1, label(), "float32", (16,), ANN, 7)
    sealed = envelope.pack(content)
    assert Envelope.unpack(sealed, content) == envelope
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(VerificationFailed, match="64 bytes was damaged"):
            Envelope.unpack(sealed, bytes(damaged))
    for place in range(1, len(sealed)):
        damaged = bytearray(sealed)
        damaged[place] ^= 1
        with pytest.raises(VerificationFailed):
            Envelope.unpack(bytes(damaged), content)
    for other in (
        replace(envelope, label=label(microbatch=1)),
        replace(envelope, dtype="int32"),
        replace(envelope, shape=(4, 4)),
        replace(envelope, epoch=2),
    ):
        sealed_for_other = other.pack(content)
        with pytest.raises(VerificationFailed):
            Envelope.unpack(sealed_for_other[:9] + sealed[9:], content)


def test_a_damaged_tensor_is_dropped_and_missed_at_once(pair: Pair) -> None:
    ann, bob = pair()
    ann.post(BOB, ann.write(BOB, label(), torch.ones(5)).damaged())
    assert bob.take(60.0) is None
    assert bob.damaged == 1
    assert bob.lacks()
    with pytest.raises(StaleEpoch, match="lost in transit"):
        bob.receive(label(), "ann", 60.0)


def test_who_lacks_something_finds_out(pair: Pair) -> None:
    ann, bob = pair()
    ann.write(BOB, label(), torch.ones(1))  # and nobody sends it
    ann.report_sent()
    with pytest.raises(StaleEpoch, match="c-bob was lost in transit"):
        bob.receive(label(), "ann", 60.0)


def test_handshakes_alone_let_nobody_miss_anything(pair: Pair) -> None:
    ann, bob = pair()
    ann.send(BOB, label()._replace(cargo="hello"), torch.zeros(1))
    ann.report_sent()
    for microbatch in range(3):
        ann.send(BOB, label(microbatch=microbatch), torch.ones(1))
    ann.report_sent()
    ann.report_sent()
    for microbatch in reversed(range(3)):
        assert bob.receive(label(microbatch=microbatch), "ann", 60.0).item() == 1.0
    with pytest.raises(ContributorLost):
        bob.receive(label(step=2), "ann", 0.7)
    assert not bob.lacks()


def test_what_was_overtaken_is_missed_only_after_a_while() -> None:
    arrivals = Arrivals()
    arrivals.came(2, 10.0)
    assert not arrivals.lack(10.4)
    arrivals.came(1, 10.45)
    assert not arrivals.lack(99.0)
    arrivals.expect(3, 100.0)
    arrivals.came(2, 100.3)  # again
    assert arrivals.lack(100.6)
    arrivals.came(5, 100.6)
    arrivals.came(3, 100.7)  # number 4 counts as missing from now on
    assert not arrivals.lack(101.1)
    assert arrivals.lack(101.3)


def test_what_a_step_waits_for_is_taken_in_any_order(pair: Pair) -> None:
    ann, bob = pair()
    ann.send(BOB, label()._replace(phase="validation"), torch.zeros(1))
    ann.send(BOB, label(microbatch=1), torch.ones(1))
    taken = [bob.take(60.0), bob.take(60.0)]
    assert [each[0] for each in taken if each is not None] == [label(microbatch=1)]
    assert bob.receive(label()._replace(phase="validation"), "ann", 60.0).item() == 0.0  # it was not lost


def test_a_wait_can_be_ended_from_another_thread(pair: Pair) -> None:
    _, bob = pair()
    with ThreadPoolExecutor(1) as other:
        other.submit(bob.wake)
        assert bob.take(60.0) is None
        other.submit(bob.interrupt)
        with pytest.raises(StaleEpoch):
            bob.receive(label(), "ann", 60.0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"dtype": "nn"}, "its dtype 'nn' is none"),
        ({"dtype": "float33"}, "its dtype 'float33' is none"),
        ({"dtype": "quint8"}, "its dtype 'quint8' is none"),
        ({"shape": (4, 4)}, "it has 24 bytes, which are no float32 of shape [4, 4]"),
        ({"shape": (-6,)}, "it has 24 bytes, which are no float32 of shape [-6]"),
    ],
)
def test_what_is_no_tensor_is_held_against_its_sender(pair: Pair, change: dict[str, Any], what: str) -> None:
    ann, bob = pair()
    encoded = ann.write(BOB, label(), torch.zeros(2, 3))
    envelope = replace(Envelope.unpack(encoded.envelope, encoded.content.data), **change)
    ann.post(BOB, encoded._replace(envelope=envelope.pack(encoded.content.data)))
    with pytest.raises(WrongTensor, match=re.escape(what)) as found:
        bob.receive(label(), "ann", 60.0)
    assert found.value.worker == ANN
    assert bob.rejected[0][:2] == (label(), ANN)


def test_an_empty_tensor_with_sizes_that_none_has_is_held_against_its_sender(pair: Pair) -> None:
    ann, bob = pair()
    encoded = ann.write(BOB, label(), torch.zeros(0))
    envelope = replace(Envelope.unpack(encoded.envelope, encoded.content.data), shape=(2**52, 2**52, 0))
    ann.post(BOB, encoded._replace(envelope=envelope.pack(encoded.content.data)))
    with pytest.raises(
        WrongTensor, match=re.escape("no float32 has shape [4503599627370496, 4503599627370496, 0]")
    ):
        bob.receive(label(), "ann", 60.0)


@pytest.mark.parametrize(
    "change",
    [
        {"label": ["train", [1], "activation", 0, 0]},
        {"label": ["train", 1, "activation", 2**60, 0]},
        {"label": ["train", 1, "pickle", 0, 0]},
        {"dtype": "x" * 1000},
        {"shape": [1] * 1000},
        {"source": 5},
    ],
    ids=repr,
)
def test_an_envelope_with_undeclared_fields_is_dropped(pair: Pair, change: dict[str, Any]) -> None:
    ann, bob = pair()
    encoded = ann.write(BOB, label(), torch.zeros(2, 3))
    known = asdict(Envelope.unpack(encoded.envelope, encoded.content.data))
    content = encoded.content.data
    written = json.dumps([list({**known, **change}.values())]).encode()
    seal = xxhash.xxh3_64_intdigest(content, seed=xxhash.xxh3_64_intdigest(written))
    ann.post(BOB, encoded._replace(envelope=struct.pack(">BQ", WIRE_VERSION, seal) + written))
    with pytest.raises(StaleEpoch, match="was lost in transit"):
        bob.receive(label(), "ann", 60.0)
    assert not bob.rejected
