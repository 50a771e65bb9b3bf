"""Rates of a member's transfers: shared by the members of a contributor, and counted; without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from share_compute_actors.transport import traffic as traffic_module
from share_compute_actors.transport.channel import Channel
from share_compute_actors.transport.envelope import WireLabel
from share_compute_actors.transport.keys import Keys, Peer
from share_compute_actors.transport.pieces import Piece, Pieces, take_all
from share_compute_actors.transport.traffic import NO_LIMITS, RateLimits, Traffic

MEGABYTE = 1_000_000


NOW_S = 100_000.0


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass for the rates, however long a test takes."""
    monkeypatch.setattr(traffic_module, "time", SimpleNamespace(monotonic=lambda: NOW_S))


class Waits:
    """Records waits instead of waiting."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def limited(folder: Path, worker: str = "ada", **rates: float) -> tuple[Traffic, Waits]:
    waits = Waits()
    return Traffic(worker, RateLimits(**rates), folder, waits), waits


def test_members_of_one_contributor_share_its_rate(tmp_path: Path) -> None:
    (first, waits_of_first), (second, waits_of_second) = (
        limited(tmp_path, upload_bytes_per_s=MEGABYTE) for _ in range(2)
    )
    first.send(2 * MEGABYTE)
    second.send(MEGABYTE)
    first.send(MEGABYTE)
    assert waits_of_first.seconds == [pytest.approx(3 - 65_536 / MEGABYTE)]
    assert waits_of_second.seconds == [pytest.approx(2 - 65_536 / MEGABYTE)]
    assert (first.sent_bytes, second.sent_bytes) == (3 * MEGABYTE, MEGABYTE)


def test_contributors_and_directions_have_rates_of_their_own(tmp_path: Path) -> None:
    ada, waits_of_ada = limited(tmp_path, upload_bytes_per_s=MEGABYTE, download_bytes_per_s=2 * MEGABYTE)
    bob, waits_of_bob = limited(tmp_path, "bob", upload_bytes_per_s=MEGABYTE)
    for member in (ada, bob):
        member.send(MEGABYTE)
        member.receive(MEGABYTE)
        member.receive(MEGABYTE)
    assert waits_of_ada.seconds == [pytest.approx(0.5, abs=0.2)]
    assert waits_of_bob.seconds == []
    assert (ada.sent_bytes, ada.received_bytes) == (MEGABYTE, 2 * MEGABYTE)


def test_without_limits_bytes_are_counted_and_no_file_is_made(tmp_path: Path) -> None:
    waits = Waits()
    member = Traffic("ada", NO_LIMITS, tmp_path, waits)
    for _ in range(3):
        member.send(2**40)
        member.receive(2**40)
        member.count(received=1)
    assert (member.sent_bytes, member.received_bytes) == (3 * 2**40, 3 * 2**40 + 3)
    assert waits.seconds == []
    assert list(tmp_path.iterdir()) == []


def test_threads_together_keep_the_rate(tmp_path: Path) -> None:
    """Eight threads send 40 pieces of 25 kB at 2 MB/s: all but the burst and the last piece take their time."""
    waits = Waits()
    members = [Traffic("ada", RateLimits(2 * MEGABYTE), tmp_path, waits) for _ in range(8)]
    threads = [
        threading.Thread(target=lambda one=member: [one.send(25_000) for _ in range(5)]) for member in members
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last_s = (40 * 25_000 - 25_000 - 65_536) / (2 * MEGABYTE)
    assert max(waits.seconds) == pytest.approx(last_s)
    assert sum(member.sent_bytes for member in members) == MEGABYTE


def test_a_state_from_before_a_restart_of_the_computer_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, waits = limited(tmp_path, upload_bytes_per_s=MEGABYTE)
    member.send(100 * MEGABYTE)
    monkeypatch.setattr(traffic_module, "time", SimpleNamespace(monotonic=lambda: NOW_S - 3600))
    member.send(MEGABYTE)
    assert waits.seconds == []
    member.send(MEGABYTE)
    assert waits.seconds == [pytest.approx(1 - 65_536 / MEGABYTE)]


@pytest.fixture
def links(tmp_path: Path) -> Iterator[tuple[Channel, Channel, Traffic, Traffic, Waits]]:
    keys = {worker: Keys.issue() for worker in ("ada", "bob")}
    admitted = {pair.public: worker for worker, pair in keys.items()}
    of_ada, waits = limited(tmp_path, upload_bytes_per_s=MEGABYTE)
    of_bob, _ = limited(tmp_path, "bob")
    with ExitStack() as stack:
        ada, bob = (
            Channel(worker, "job", 1, "127.0.0.1", keys[worker], admitted, counts)
            for worker, counts in (("ada", of_ada), ("bob", of_bob))
        )
        stack.callback(ada.close)
        stack.callback(bob.close)
        ada.connect(Peer("bob", "bob", bob.endpoint, keys["bob"].public))
        yield ada, bob, of_ada, of_bob, waits


def test_a_channel_keeps_the_upload_rate_and_counts_both_ways(
    links: tuple[Channel, Channel, Traffic, Traffic, Waits],
) -> None:
    ada, bob, of_ada, of_bob, waits = links
    for microbatch in range(2):
        label = WireLabel("train", 1, "activation", microbatch, 0)
        ada.send("bob", label, torch.zeros(500_000))
        bob.receive(label, "ada", 10.0)
    assert waits.seconds == [pytest.approx(2 - 65_536 / MEGABYTE)]
    assert of_ada.sent_bytes == of_bob.received_bytes == 4_000_000


def test_a_sender_makes_one_piece_at_a_time_for_a_slow_receiver() -> None:
    """The receiver requests each piece, so data that was not requested does not exist outside the shard."""
    pieces = Pieces({"model": {f"w{number}": torch.zeros(600_000) for number in range(8)}}, 0)
    given: list[int] = []
    written = 0

    def ask(number: int) -> Piece | None:
        assert written == sum(given), "a piece was made before the one before was written"
        piece = pieces.give(number)
        if piece is not None:
            given.append(piece.content.nbytes)
        return piece

    def write(_: str, content: bytes) -> None:
        nonlocal written
        written += len(content)

    take_all("ada", 0, ask, write)
    assert len(given) >= 8
    assert max(given) <= 2 * 2**21
