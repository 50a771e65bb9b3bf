"""Targets, settings and problems that follow from the job file of a sparse model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from share_compute.errors import UserError
from share_compute.quantities import bytes_text, listed
from share_compute.sparse.cocoa import DualLoss, DualProblem
from share_compute.sparse.preparation import DealtRows, TargetKind, Targets, blocks_of_file
from share_compute.sparse.settings import SparseSettings
from share_compute.specification.sparse.job import SparseJob
from share_compute.specification.sparse.models import (
    FactorizationMachineSpec,
    LdaSpec,
    LogisticSpec,
    MatrixFactorizationSpec,
    RidgeSpec,
    SvmSpec,
)
from share_compute.topology import Contributor

_MOST_WORKER_BYTES = 2 << 30
_LEAST_WORKER_BYTES = 16 << 20
_BLOCK_ENTRY_BYTES = 40
"""Bytes of an entry of a minibatch: value and column, what they are made from, and what is computed from them."""
_DUAL_ENTRY_BYTES = _BLOCK_ENTRY_BYTES + 12
"""The same for a worker of CoCoA, which has a copy of its rows in float64."""
_DUAL_ROW_BYTES = 256
"""Bytes of a row of a worker of CoCoA: its target, norm and dual variable, as arrays and as lists."""
_KEY_BYTES = 64
"""Bytes of a key at a worker: its place and its weight, before and after a round, and in messages."""


def target_kind(spec: SparseJob) -> TargetKind:
    """Return what the model needs as targets."""
    match spec.model:
        case LogisticSpec() | FactorizationMachineSpec():
            return "zero_one"
        case SvmSpec():
            return "signs"
        case LdaSpec():
            return "none"
        case MatrixFactorizationSpec() | RidgeSpec():
            return "numbers"


def check_first_rows(spec: SparseJob) -> None:
    """Check the first rows of each file, and their targets.

    Raises:
        UserError: a file cannot be read, or has a wrong row; the error names file and line.
    """
    targets = Targets(target_kind(spec))
    for file in (*spec.data.files, *spec.data.validation_files):
        for rows in islice(blocks_of_file(file, spec.data.format, spec.data.columns), 1):
            targets.converted(rows, file)


def chosen_machines(spec: SparseJob, machines: Sequence[Contributor]) -> list[Contributor]:
    """Return the machines with the most memory, at most as many as the job can use."""

    def memory_bytes(machine: Contributor) -> int:
        return sum(device.memory_bytes for device in machine.devices)

    ordered = sorted(machines, key=lambda machine: (-memory_bytes(machine), machine.id))
    return ordered[: spec.machines_used]


def placement_sentence(spec: SparseJob, machines: Sequence[Contributor]) -> str:
    """Return a sentence about the processes that run on these machines."""
    training, names = spec.training, listed([machine.name for machine in machines])
    if training.hogwild_threads is not None:
        return f"{_count(training.hogwild_threads, 'thread')} on {names}"
    if spec.is_dual:
        return f"{_count(training.workers, 'worker')} on {names}"
    what = f"{_count(training.workers, 'worker')} and {_count(training.servers, 'server')} on {names}"
    if len(machines) == 1:
        what += "; its ranges have no backup, which needs a second machine"
    return what


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def worker_memory_bytes(settings: SparseSettings, machines: Sequence[Contributor], rows: int) -> int:
    """Return the size of the minibatches that a worker may keep in memory; it keeps the others in a file.

    Servers and backups get memory first. Workers share half of each machine's remaining lent memory; the other half is
    for messages and computations.

    Args:
        settings: settings of the model.
        machines: machines on which ranges and workers are placed in turn.
        rows: approximate number of rows of weights.

    Raises:
        UserError: a machine does not lend enough memory for its ranges.
    """
    number = len(machines)
    state_bytes = 4 * settings.build_rule().state_width
    # Server: the table grows by doubling; a checkpoint takes a copy and its bytes; measuring takes a copy and a table.
    # Backup: the table, and its first snapshot, as bytes and as arrays.
    row_bytes = 6 * state_bytes + 56 + (4 * state_bytes + 32 if number > 1 else 0)
    num_ranges, num_workers = -(-settings.ranges // number), -(-settings.workers // number)
    ranges_bytes = num_ranges * -(-rows // settings.ranges) * row_bytes
    found = _MOST_WORKER_BYTES
    for machine in machines:
        rest_bytes = _rest_bytes(
            machine,
            ranges_bytes,
            f"its part of about {rows} rows of weights",
            "lend more memory, add machines and raise training.servers, or give the model fewer factors",
        )
        found = found if rest_bytes is None else min(found, rest_bytes // (2 * num_workers))
    return max(found, _LEAST_WORKER_BYTES)


def _rest_bytes(machine: Contributor, needed_bytes: int, what: str, hint: str) -> int | None:
    """Return the lent memory of a machine minus the required memory; None if its main memory is not known.

    Raises:
        UserError: the machine lends less than required.
    """
    lent = max((device.memory_bytes for device in machine.devices if device.kind == "cpu"), default=None)
    if lent is None:
        return None
    if needed_bytes > lent:
        raise UserError(
            f"machine {machine.name} lends {bytes_text(lent)} of memory, but {what} needs {bytes_text(needed_bytes)}",
            hint=hint,
        )
    return lent - needed_bytes


def require_memory(spec: SparseJob, machines: Sequence[Contributor], prepared: DealtRows) -> None:
    """Check the memory of the machines of a job without servers: its workers keep all their rows in memory.

    Args:
        spec: a job that is trained by CoCoA or by Hogwild threads.
        machines: machines on which workers are placed in turn.
        prepared: rows of the job.

    Raises:
        UserError: a machine does not lend enough memory for its workers.
    """
    if spec.is_dual:
        needs = [
            entries * _DUAL_ENTRY_BYTES
            + sum(rows) * _DUAL_ROW_BYTES
            + min(prepared.keys, entries) * _KEY_BYTES
            for entries, rows in zip(prepared.entries, prepared.rows, strict=True)
        ]
        hint = "lend more memory, or add machines and raise training.workers"
    else:
        state_bytes = 4 * settings_of(spec, prepared).build_rule().state_width
        # the rows of weights, a copy with its bytes for a checkpoint, and the result
        needs = [
            prepared.entries[0] * _BLOCK_ENTRY_BYTES + prepared.keys * (4 * state_bytes + _KEY_BYTES),
        ]
        hint = "lend more memory, or leave training.hogwild_threads out and train with servers"
    for number, machine in enumerate(machines):
        own = range(number, len(needs), len(machines))
        rows = sum(sum(prepared.rows[at]) for at in own)
        entries = sum(prepared.entries[at] for at in own)
        _rest_bytes(
            machine,
            sum(needs[at] for at in own),
            f"its part of {rows} rows of data with {entries} entries, and about {prepared.keys} keys,",
            hint,
        )


_SETTING_NAMES = {"topics": "factors", "initial_deviation": "scale"}
"""Option of a model -> the setting with the same meaning, if their names differ."""


def settings_of(spec: SparseJob, prepared: DealtRows) -> SparseSettings:
    """Return the settings of a model that is trained with servers or Hogwild threads.

    Args:
        spec: a job whose model is not trained by CoCoA.
        prepared: rows of the job.
    """
    training, model = spec.training, spec.model
    assert not isinstance(model, RidgeSpec | SvmSpec), f"{model.name} is trained by CoCoA"
    options = {
        _SETTING_NAMES.get(name, name): value for name, value in model.model_dump(exclude={"name"}).items()
    }
    found = SparseSettings(
        "topics" if isinstance(model, LdaSpec) else model.name,
        workers=training.workers,
        ranges=training.servers,
        passes=training.passes,
        batch_size=training.batch_size,
        staleness=training.bound,
        seed=training.seed,
        learning_rate=training.learning_rate,
        threshold=training.threshold,
        value_type=training.values,
        **options,
    )
    match model:
        case MatrixFactorizationSpec():
            return replace(found, mean=prepared.mean)
        case LdaSpec():
            return replace(found, documents=prepared.num_rows)
        case _:
            return found


def dual_problem_of(spec: SparseJob, prepared: DealtRows) -> DualProblem:
    """Return the problem of a model that is trained by CoCoA."""
    assert isinstance(spec.model, RidgeSpec | SvmSpec)
    loss: DualLoss = "squared" if isinstance(spec.model, RidgeSpec) else "hinge"
    return DualProblem(loss, spec.model.l2, prepared.num_rows, spec.training.workers)
