"""Tensors that a member fetches from others: damaged pieces are requested again; without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ObjectLostError

from share_compute.errors import ContributorLost, StaleEpoch, UserError, WrongTensor
from share_compute.models.storage.weights import rows_of
from share_compute.shards import Shard
from share_compute_actors.group import fetching
from share_compute_actors.messages import Extent, Source, Sources, read_extents, server_source
from share_compute_actors.training.member import loading
from share_compute_actors.transport.pieces import Piece
from share_compute_actors.transport.traffic import RateLimits, Traffic
from share_compute_actors.wire import NAMES, pack_answer

HELD = {"large": torch.rand(5, 3), "small": torch.rand(7), "scalar": torch.tensor(2.5)}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer every call at once, in this process."""
    monkeypatch.setattr(fetching.ray, "get", lambda answer: answer)


def giver(spoil: Callable[[int, Piece], Piece]) -> Any:
    """Return an actor that has the tensors; ``spoil`` takes the number of the call and its answer."""
    calls: list[Sequence[Extent]] = []

    def weights(extents_data: bytes) -> list[Piece]:
        extents = read_extents(extents_data)
        calls.append(extents)
        found = (Piece.of_rows(name, rows_of(HELD[name], start, stop)) for name, start, stop in extents)
        return [spoil(len(calls), piece) for piece in found]

    return SimpleNamespace(weights=SimpleNamespace(remote=weights), calls=calls)


def damaged(piece: Piece) -> Piece:
    content = piece.content.copy()
    content[-1] ^= 4
    return piece._replace(content=content)


def loaded(source: Source) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in HELD.items()}
    fetching.fill(tensors, fetching.SourceClient(Sources((source,))), "weights")
    return tensors


def test_a_damaged_piece_is_requested_again_and_no_other() -> None:
    actor = giver(lambda call, piece: damaged(piece) if piece.name == "small" and call < 3 else piece)
    tensors = loaded(Source(actor, "ada", "ada"))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in HELD.items())
    assert [[extent.name for extent in call] for call in actor.calls] == [list(HELD), ["small"], ["small"]]


def test_an_answer_that_died_with_its_machine_begins_another_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_: Any) -> Any:
        raise ObjectLostError("00", None, "")

    monkeypatch.setattr(fetching.ray, "get", lose)
    with pytest.raises(StaleEpoch):
        loaded(Source(giver(lambda _, piece: piece), "ada", "ada"))


def test_what_never_arrives_whole_names_its_machine() -> None:
    actor = giver(lambda _, piece: damaged(piece) if piece.name == "large" else piece)
    with pytest.raises(ContributorLost, match="large arrived damaged from ada") as lost:
        loaded(Source(actor, "ada", "ada"))
    assert lost.value.machine == "ada"
    with pytest.raises(ContributorLost, match="from the server") as lost:
        loaded(server_source(actor))
    assert lost.value.machine == "the server"


def test_a_member_that_loads_from_its_own_copy_makes_no_call() -> None:
    copied = giver(lambda call, piece: damaged(piece) if call == 1 else piece)
    own: Any = SimpleNamespace(weights=lambda extents, _shard: copied.weights.remote(extents))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in HELD.items()}
    client = fetching.SourceClient(Sources((Source(None, "ada", "ada", (0, 4)),)), "ada", own)
    fetching.fill(tensors, client, "weights")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in HELD.items())
    assert len(copied.calls) == 1 + len(HELD)


@pytest.mark.parametrize("answer", [b"+[3]", b"noise", 5], ids=repr)
def test_a_member_that_gives_no_names_is_blamed_by_the_one_that_loads(answer: Any) -> None:
    """The loading member cannot pass `Undeclared` on: the coordinator would end the job."""
    actor = SimpleNamespace(inventory=SimpleNamespace(remote=lambda: answer))
    stage: Any = SimpleNamespace(
        persistent=lambda: dict(HELD),
        added=frozenset({"small"}),
        initialize_added=lambda _seed: None,
        shard=Shard("m", 0, 1, 1),
    )
    runner: Any = SimpleNamespace(stage=stage)
    setup: Any = SimpleNamespace(version=None, name="bob", training=SimpleNamespace(seed=0))
    client = fetching.SourceClient(Sources((Source(actor, "ada", "c-ada"),)))
    with pytest.raises(WrongTensor, match="ada sent a message that does not match its schema") as found:
        loading.fill_runner(runner, setup, client)
    assert found.value.worker == "c-ada"


def test_a_branch_does_not_initialize_what_the_job_adds_to_the_model() -> None:
    """Each branch would initialize different adapters, because each has its own seed."""
    names = pack_answer(NAMES, ("large", "scalar"))
    actor = SimpleNamespace(inventory=SimpleNamespace(remote=lambda: names))
    stage: Any = SimpleNamespace(
        persistent=lambda: dict(HELD),
        added=frozenset({"small"}),
        initialize_added=lambda _seed: None,
        shard=Shard("m", 0, 1, 1),
    )
    runner: Any = SimpleNamespace(stage=stage)
    setup: Any = SimpleNamespace(version=0, name="ada", training=SimpleNamespace(seed=0))
    client = fetching.SourceClient(Sources((server_source(actor),)))
    with pytest.raises(UserError, match="lack the tensors that the job adds"):
        loading.fill_runner(runner, setup, client)


def test_downloads_wait_before_they_are_requested_and_own_copies_do_not(tmp_path: Path) -> None:
    waits: list[float] = []
    traffic = Traffic("ada", RateLimits(download_bytes_per_s=10.0), tmp_path, waits.append)
    actor = giver(lambda _, piece: piece)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in HELD.items()}
    own: Any = SimpleNamespace(weights=actor.weights.remote)
    mine = fetching.SourceClient(Sources((Source(None, "ada", "ada"),)), "ada", own, traffic)
    fetching.fill(tensors, mine, "weights")
    assert (traffic.received_bytes, waits) == (0, [])
    remote = fetching.SourceClient(Sources((Source(actor, "bob", "bob"),)), "ada", own, traffic)
    for _ in range(2):
        fetching.fill(tensors, remote, "weights")
    size_bytes = sum(tensor.nbytes for tensor in HELD.values())
    assert traffic.received_bytes == 2 * size_bytes
    assert waits == []  # less than the burst
