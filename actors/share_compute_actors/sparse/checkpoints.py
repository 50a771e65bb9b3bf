"""Checkpoints of sparse models: a snapshot of each range, from which all workers and servers can restart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
import xxhash
from pydantic import TypeAdapter, ValidationError
from ray.exceptions import GetTimeoutError, RayError

from share_compute.errors import StaleEpoch, UserError, VerificationFailed
from share_compute.models.storage.checkpoints import STATE, newest_whole
from share_compute.models.storage.weights import FolderWriter, prune_folders
from share_compute.sparse.cocoa import DualProblem, Vector
from share_compute.sparse.settings import SparseSettings
from share_compute_actors.sparse.messages import FROZEN, FrozenAnswer
from share_compute_actors.wire import unpack_answer

_F = TypeVar("_F")
LONGEST_FREEZE_S = 600.0
"""Longest wait for the minibatches until the clock of a checkpoint."""
PART_BYTES = 4 << 20
"""Bytes of a snapshot in one call, so that Ray sends them inline."""
_MOST_TRIES = 8
"""Number of times that snapshots at one clock are tried; each time the clock is twice as far ahead."""


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Folder and intervals of a run's checkpoints."""

    folder: Path
    every_s: float = 300.0
    kept: int = 2
    """Number of checkpoints that are kept."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk."""

    folder: Path
    step: int
    """Largest number of pushes of a worker that all ranges have."""
    size_bytes: int
    has_fewer_passes: bool = False
    """Whether the checkpoint is of a run with fewer passes, so that workers that had ended continue."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Description of a checkpoint beside its snapshots."""

    settings: SparseSettings
    step: int
    clocks: dict[int, int]
    """Number of acknowledged pushes of each worker that all ranges have; the worker continues after them."""
    data: str
    """Digest of the data files."""


@dataclass(frozen=True, slots=True)
class DualFacts:
    """Description of a CoCoA checkpoint, without weights and dual variables."""

    problem: DualProblem
    seed: int
    step: int
    """Number of finished rounds."""
    data: str
    """Digest of the data files."""


_FACTS = TypeAdapter(CheckpointFacts)
_DUAL_FACTS = TypeAdapter(DualFacts)
_WEIGHTS = "weights.bin"


def save_checkpoint(
    options: CheckpointOptions, settings: SparseSettings, servers: Sequence[Any], data: str
) -> SavedCheckpoint | None:
    """Write a checkpoint; return None if a server was lost or replaced meanwhile.

    Args:
        options: folder and intervals of checkpoints.
        settings: settings of the model.
        servers: server of each range.
        data: digest of the data files.

    Raises:
        Unavailable: the disk is full or cannot be written.
    """
    try:
        clock, frozen = _frozen(settings, servers)
        try:
            clocks = {
                worker: min(dict(each.clocks).get(worker, 0) for each in frozen)
                for worker in range(settings.workers)
            }
            parts = {
                range_name(number): _parts(server, number, clock, each.size_bytes)
                for number, (server, each) in enumerate(zip(servers, frozen, strict=True))
            }
            return write_checkpoint(
                options, CheckpointFacts(settings, max(clocks.values()), clocks, data), parts
            )
        finally:
            for number, server in enumerate(servers):
                server.thaw.remote(number, clock, "checkpoint")
    except (RayError, StaleEpoch):
        return None


def write_checkpoint(
    options: CheckpointOptions, facts: CheckpointFacts | DualFacts, files: Mapping[str, Iterable[bytes]]
) -> SavedCheckpoint:
    """Write a checkpoint, and remove the oldest ones.

    Args:
        options: folder and intervals of checkpoints.
        facts: description of the checkpoint.
        files: content of each file in parts, by name.

    Raises:
        Unavailable: the disk is full or cannot be written.
    """
    writer = FolderWriter(options.folder / f"step-{facts.step:08}")
    try:
        for name, parts in files.items():
            for part in parts:
                writer.write(name, part)
        writer.write_json(STATE, asdict(facts))
        size_bytes = writer.finish()
    except BaseException:
        writer.discard()
        raise
    prune_folders(options.folder, options.kept)
    return SavedCheckpoint(writer.target, facts.step, size_bytes)


def save_dual(
    options: CheckpointOptions, facts: DualFacts, weights: Vector, duals: Sequence[Vector]
) -> SavedCheckpoint:
    """Write a checkpoint of CoCoA.

    Args:
        options: folder and intervals of checkpoints.
        facts: description of the checkpoint.
        weights: weight of each place.
        duals: dual variables of each worker.

    Raises:
        Unavailable: the disk is full or cannot be written.
    """
    arrays = {_WEIGHTS: weights, **{_duals_name(number): each for number, each in enumerate(duals)}}
    return write_checkpoint(options, facts, {name: cut(array.tobytes()) for name, array in arrays.items()})


def cut(content: bytes) -> Iterator[bytes]:
    """Yield bytes in parts of `PART_BYTES`."""
    for offset in range(0, len(content), PART_BYTES):
        yield content[offset : offset + PART_BYTES]


def dual_state(saved: SavedCheckpoint, workers: int) -> tuple[Vector, list[Vector]]:
    """Return the weights and the dual variables of each worker of a checkpoint of CoCoA."""
    names = [_WEIGHTS, *map(_duals_name, range(workers))]
    weights, *duals = (np.fromfile(saved.folder / name, np.float64) for name in names)
    return weights, duals


def _duals_name(worker: int) -> str:
    return f"duals-{worker:04}.bin"


def newest_dual(
    folder: Path, problem: DualProblem, seed: int, data: str
) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint of CoCoA, and messages about damaged ones; see `newest_checkpoint`.

    Raises:
        UserError: all checkpoints are damaged, or the newest whole one belongs to another problem or other data.
        VerificationFailed: the description of the checkpoint cannot be read.
    """
    newest, notes = _newest(folder, _DUAL_FACTS)
    if newest is None:
        return None, notes
    found, facts = newest
    is_same = (facts.problem, facts.seed) == (problem, seed)
    _require_same(found, has_same_data=facts.data == data, has_same_settings=is_same)
    return SavedCheckpoint(found, facts.step, _size_bytes(found)), notes


def _frozen(settings: SparseSettings, servers: Sequence[Any]) -> tuple[int, list[FrozenAnswer]]:
    """Make all servers keep a snapshot; return its clock, and the descriptions.

    In a synchronous run all snapshots have the same clock, so that training continues with the same bits.
    """
    ahead = 2
    for attempt in range(_MOST_TRIES):
        clock = 0
        if settings.staleness == 0:
            now = [ray.get(server.clocks.remote(number)) for number, server in enumerate(servers)]
            clock = ahead + max((each for clocks in now for _, each in clocks), default=0)
        calls = [server.freeze.remote(number, clock, "checkpoint") for number, server in enumerate(servers)]
        try:
            answers = ray.get(calls, timeout=LONGEST_FREEZE_S)
        except GetTimeoutError:
            for number, server in enumerate(servers):
                server.thaw.remote(number, clock, "checkpoint")
            raise
        frozen = [unpack_answer(FROZEN, answer, "a server") for answer in answers]
        if settings.staleness != 0 or all(each.clocks == frozen[0].clocks for each in frozen):
            return clock, frozen
        for number, server in enumerate(servers):
            server.thaw.remote(number, clock, "checkpoint")
        ahead = 4 << attempt
    raise StaleEpoch("the ranges could not be saved at one clock")


def _parts(server: Any, number: int, clock: int, size_bytes: int) -> Iterator[bytes]:
    for offset in range(0, size_bytes, PART_BYTES):
        part = ray.get(server.frozen_part.remote(number, clock, offset, PART_BYTES))
        if len(part) != min(PART_BYTES, size_bytes - offset):
            raise StaleEpoch(f"the server of range {number} does not keep its snapshot any more")
        yield part


def range_name(number: int) -> str:
    """Return the name of the file with the snapshot of a range."""
    return f"range-{number:04}.safetensors"


def data_digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of files, in their order."""
    hasher = xxhash.xxh3_128()
    for file in files:
        hasher.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as content:
            while part := content.read(PART_BYTES):
                hasher.update(part)
    return hasher.hexdigest()


def newest_checkpoint(
    folder: Path, settings: SparseSettings, data: str
) -> tuple[SavedCheckpoint | None, tuple[str, ...]]:
    """Return the newest whole checkpoint, and messages about damaged ones.

    Raises:
        UserError: all checkpoints are damaged, or the newest whole one belongs to another model or other data.
        VerificationFailed: the description of the checkpoint cannot be read.
    """
    newest, notes = _newest(folder, _FACTS)
    if newest is None:
        return None, notes
    found, facts = newest
    passes = facts.settings.passes
    is_same = replace(facts.settings, passes=settings.passes) == settings and passes <= settings.passes
    _require_same(found, has_same_data=facts.data == data, has_same_settings=is_same)
    return SavedCheckpoint(found, facts.step, _size_bytes(found), passes < settings.passes), notes


def _newest(folder: Path, adapter: TypeAdapter[_F]) -> tuple[tuple[Path, _F] | None, tuple[str, ...]]:
    """Return the newest whole checkpoint with its description, if there is one, and messages about damaged ones."""
    chosen = newest_whole(folder / "newest")
    if chosen.folder is None:
        return None, ()
    try:
        facts = adapter.validate_json((chosen.folder / STATE).read_bytes())
    except ValidationError as failure:
        raise VerificationFailed(
            f"{chosen.folder} is no checkpoint of a sparse model: {failure.errors()[0]['msg']}",
            hint="start the job again",
        ) from None
    return (chosen.folder, facts), chosen.notes


def _require_same(folder: Path, *, has_same_data: bool, has_same_settings: bool) -> None:
    if not has_same_settings:
        raise UserError(
            f"{folder.name} is a checkpoint of a model with other settings",
            hint="submit a new job, or change only the number of passes, to a larger one",
        )
    if not has_same_data:
        raise UserError(
            "the data has changed: its rows are not those of the checkpoint",
            hint="put the data files back as they were, or submit a new job",
        )


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def restore_range(checkpoint: SavedCheckpoint, number: int, server: Any) -> None:
    """Send a server the snapshot with which a range begins."""
    offset = 0
    for part in range_parts(checkpoint, number):
        ray.get(server.restore.remote(number, offset, part, go_on=checkpoint.has_fewer_passes))
        offset += len(part)


def range_parts(checkpoint: SavedCheckpoint, number: int) -> Iterator[bytes]:
    """Yield the snapshot of a range of a checkpoint in parts."""
    with (checkpoint.folder / range_name(number)).open("rb") as file:
        while part := file.read(PART_BYTES):
            yield part
