"""A process that holds a range of a job's weights, on a machine of the job or of the control plane."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError

from share_compute.errors import ContributorLost, ShareComputeError, UserError
from share_compute.models.storage.slots import parameter_of
from share_compute.models.storage.weights import WeightFolder
from share_compute.specification import TrainingSpec
from share_compute.synchronization.aggregator import payload_bytes
from share_compute.synchronization.ranges import (
    Fill,
    FollowingAggregator,
    RangeAggregator,
    RangeDigests,
    RangeLayout,
)
from share_compute.synchronization.records import BranchRun, MergeRecord
from share_compute_actors.group.answering import answered, answers
from share_compute_actors.group.failing import FailsOnRequest
from share_compute_actors.group.lifeline import Lifeline
from share_compute_actors.group.packed_fetching import PackedClient, filled, lost
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.machine.temporary import private_folder, temporary_folder
from share_compute_actors.messages import Source, Sources, read_extents
from share_compute_actors.transport.pieces import PIECES, Piece
from share_compute_actors.transport.traffic import RateLimits, Traffic
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import FLAG, NAMES, NOTHING, Natural, Schema

_FOLDERS = re.compile(r"(versions|outer|updates|contributions)/[0-9-]{1,40}")
"""Folders that other machines may read."""
SERVER = "server"
"""Worker of a `RemoteSource` on the control plane's machine."""
_LOCK = "lock"
"""Name of the file that a process locks."""


@dataclass(frozen=True, slots=True)
class RangeSetup:
    """The parameters that a range's process is started with."""

    number: Natural
    """Index of the range."""
    worker: str
    """Contributor of the process; empty on the control plane's machine."""
    training: str
    """Training settings of the job, as JSON."""
    layout: RangeLayout | None = None
    """The parameters of the range; None on the control plane's machine, which has all of them in its folder."""
    folder: str = ""
    """Folder of the weights; empty for a temporary one."""
    limits: tuple[float, float] = (0.0, 0.0)
    """Upload and download rates that the owner allows, in bytes/s; 0.0 for no limit."""


class RemoteSource(NamedTuple):
    """A machine from which tensors are read. Its actor is a separate argument of the call."""

    name: str
    """Name of the machine, for display."""
    worker: str
    """Its contributor."""
    tensors: tuple[str, ...]
    """Stored names of the tensors to read from it; empty for all."""


class FollowedRange(NamedTuple):
    """A range whose update the control plane's machine follows."""

    source: RemoteSource
    digest: str
    """Digest of the weights of the range after the merge."""


class RangeStanding(NamedTuple):
    """Answer of a range's process to a later attempt at the job."""

    actor: str
    """Name of the actor."""
    number: Natural
    """Index of the range."""
    names: tuple[str, ...]
    """Names of the parameters of the range."""
    has_version: bool


class Received(NamedTuple):
    """A part of a contribution that is stored."""

    digest: str
    size_bytes: Natural


Slots = dict[str, tuple[int, ...]]
SETUP: Schema[RangeSetup] = Schema(RangeSetup)
SOURCES: Schema[tuple[RemoteSource, ...]] = Schema(tuple[RemoteSource, ...])
FOLLOWED: Schema[tuple[FollowedRange, ...]] = Schema(tuple[FollowedRange, ...])
RECEIVED: Schema[Received] = Schema(Received)
RECORD: Schema[MergeRecord] = Schema(MergeRecord)
STANDING: Schema[RangeStanding] = Schema(RangeStanding)
RUN: Schema[BranchRun] = Schema(BranchRun)
DIGESTS: Schema[RangeDigests] = Schema(RangeDigests)
PAYLOADS: Schema[dict[str, str]] = Schema(dict[str, str])
SLOTS: Schema[Slots | None] = Schema(Slots | None)


# `max_task_retries`: Ray repeats calls whose connection broke.
@ray.remote(
    num_cpus=0,
    max_task_retries=-1,
    concurrency_groups={"control": 1, "files": 4, "rows": 4, "merging": 1},
)
class RangeServer(FailsOnRequest):
    """Has a range of the weights, and computes its merges.

    Tensors are served from the folders of the aggregator, as rows in pieces with checksums. Everything that is loaded
    from another machine has a known size, and is checked.

    Args:
        setup: a packed `RangeSetup`.
    """

    def __init__(self, setup: bytes) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._setup = SETUP.unpack(setup, "the coordinator")
        self._training = TrainingSpec.model_validate_json(self._setup.training)
        self._traffic = Traffic(self._setup.worker, RateLimits(*self._setup.limits))
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        """Lock of each contribution."""
        self._folder = Path(self._setup.folder) if self._setup.folder else new_folder()
        layout = self._setup.layout or RangeLayout((), {})
        self._range = RangeAggregator(self._folder, self._training, layout)
        self._whole = FollowingAggregator(self._folder, self._training)
        self._lifeline = Lifeline() if self._setup.worker else None

    @ray.method(concurrency_group="control")
    @answers(NOTHING)
    def status(self) -> None:
        """Answer, and restart the time limit of `Lifeline`."""
        if self._lifeline is not None:
            self._lifeline.pull()

    @ray.method(concurrency_group="merging")
    @answers(STANDING)
    def standing(self, version: int) -> RangeStanding:
        """Return the range, and whether the files of a version are intact; remove files of later versions."""
        self._range.forget_after(version)
        name = ray.get_runtime_context().get_actor_name() or ""
        return RangeStanding(name, self._setup.number, tuple(self._range.names), self._range.has(version))

    # -- copies --------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="merging")
    @answers(FLAG)
    def copy(self, version: int, source: bytes, actor: Any) -> bool:
        """Copy a version from another machine, and the state of the outer optimizer if that machine has it.

        Return whether all state was copied.

        Raises:
            ContributorLost: the other machine was lost, or sent data that does not fit.
            VerificationFailed: the state does not fit the range.
        """
        return self._copy(version, _sources(SOURCES.unpack(source, "the coordinator"), [actor]))

    def _copy(self, version: int, sources: Sources) -> bool:
        folder = f"outer/{version:08}"
        found = self._slots_of(sources.all[0], folder)
        own = self._range.names
        slots = None if found is None else {slot: found[slot] for slot in found if parameter_of(slot) in own}
        if slots is not None and sources.all[0].worker == SERVER and not self._range.fits(slots):
            slots = None  # an earlier attempt did not save the state of all ranges
        self._range.copy(
            version,
            partial(filled, self._client(sources, f"versions/{version:08}"), "rows"),
            slots,
            partial(filled, self._client(sources, folder), "rows"),
        )
        return slots is not None or not self._range.has_state

    def _client(self, sources: Sources, folder: str | None) -> PackedClient:
        return PackedClient(sources, self._traffic, folder)

    def _slots_of(self, source: Source, folder: str) -> Slots | None:
        try:
            return answered(SLOTS, source.actor.slots.remote(folder), source.name)
        except (RayError, ShareComputeError) as failure:
            raise lost(source) from failure

    @ray.method(concurrency_group="merging")
    @answers(DIGESTS)
    def copy_merge(self, version: int, source: bytes, actor: Any) -> RangeDigests:
        """Copy another machine's results for a version; raise the errors of `copy`."""
        sources = _sources(SOURCES.unpack(source, "the coordinator"), [actor])
        self._copy(version, sources)
        client = self._client(sources, f"updates/{version:08}")
        self._range.copy_update(version, partial(filled, client, "rows", dtype=torch.uint8))
        return self._range.digests(version)

    # -- contributions -------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="files")
    @answers(RECEIVED)
    def receive(self, key: str, run: bytes, members: bytes, *actors: Any) -> Received:
        """Fetch this range's part of a contribution from members of the branch, and store it.

        Args:
            key: name of the contribution.
            run: packed `BranchRun`.
            members: packed `RemoteSource` of each member.
            actors: the members, in the same order.

        Raises:
            ContributorLost: a member sent data that does not fit, or damaged data in every attempt.
            StaleEpoch: a member died.
            VerificationFailed: the contribution is damaged, for example because a number is not finite.
        """
        sources = _sources(SOURCES.unpack(members, "the coordinator"), actors)
        client = self._client(sources, None)
        return self._store(key, run, partial(filled, client, "contribution_rows", dtype=torch.uint8))

    @ray.method(concurrency_group="files")
    @answers(RECEIVED)
    def copy_contribution(self, key: str, run: bytes, source: bytes, actor: Any) -> Received:
        """Fetch this range's part of a contribution from the server of the range; see `receive`."""
        sources = _sources(SOURCES.unpack(source, "the coordinator"), [actor])
        client = self._client(sources, f"contributions/{key}")
        return self._store(key, run, partial(filled, client, "rows", dtype=torch.uint8))

    def _store(self, key: str, run: bytes, fill: Fill) -> Received:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # a branch may resend a contribution while the first call still reads it
            digest = self._range.receive(key, RUN.unpack(run, "the coordinator"), fill)
        return Received(digest, payload_bytes(self._range.contribution_folder(key)))

    # -- merges --------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="merging")
    @answers(DIGESTS)
    def merge(self, record: bytes, keys: bytes) -> RangeDigests:
        """Compute the range's part of a merge.

        Args:
            record: packed `MergeRecord`.
            keys: packed names of the contributions in the record, in its order.

        Raises:
            Unavailable, UserError, VerificationFailed: as `Aggregator.merge`.
        """
        merged = RECORD.unpack(record, "the coordinator")
        names = NAMES.unpack(keys, "the coordinator")
        return self._range.merge_range(merged, dict(zip(merged.runs, names, strict=True)))

    @ray.method(concurrency_group="merging")
    @answers(NOTHING)
    def prune(self, version: int, oldest_base: int, keys: bytes) -> None:
        """Remove files that are no longer needed; see `Aggregator.prune`.

        Args:
            version: the newest version.
            oldest_base: oldest version that a branch uses.
            keys: packed names of contributions that are merged or not used.
        """
        self._range.prune(version, oldest_base)
        self._range.forget(NAMES.unpack(keys, "the coordinator"))

    @ray.method(concurrency_group="control")
    @answers(NOTHING)
    def close(self) -> None:
        """Remove the temporary folder."""
        if not self._setup.folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- on the control plane's machine --------------------------------------------------------------------------------

    @ray.method(concurrency_group="merging")
    @answers(PAYLOADS)
    def follow(self, version: int, facts: bytes, ranges: bytes, *actors: Any) -> dict[str, str]:
        """Add the updates of all ranges to the whole weights; return the digest of each payload.

        Args:
            version: version that the updates make.
            facts: training state, as JSON.
            ranges: packed `FollowedRange` of each range.
            actors: the actors that have the updates, in the same order.

        Raises:
            ContributorLost: a machine was lost, or sent data that does not fit.
            VerificationFailed: the weights of a range are not those that its machine computed; ``details`` has its
                ``range``.
        """
        followed = FOLLOWED.unpack(ranges, "the coordinator")
        sources = _sources([each.source for each in followed], actors)
        fill = partial(filled, self._client(sources, f"updates/{version:08}"), "rows", dtype=torch.uint8)
        digests = [(each.source.tensors, each.digest) for each in followed]
        return self._whole.follow(version, fill, digests, json.loads(facts))

    @ray.method(concurrency_group="merging")
    @answers(NOTHING)
    def keep_outer(self, version: int, ranges: bytes, *actors: Any) -> None:
        """Copy the state of the outer optimizer of all ranges, so that another attempt can continue with it.

        Args:
            version: version of the weights to which the state belongs.
            ranges: packed `RemoteSource` of each range.
            actors: the actors that have the state, in the same order.

        Raises:
            ContributorLost: a machine was lost, or sent data that does not fit.
            VerificationFailed: the state does not fit the parameters of a range, or a number is not finite.
        """
        folder = f"outer/{version:08}"
        groups: list[tuple[tuple[str, ...], Slots, Fill]] = []
        for source, actor in zip(SOURCES.unpack(ranges, "the coordinator"), actors, strict=True):
            one = _sources([source], [actor])
            slots = self._slots_of(one.all[0], folder)
            if slots is None:
                raise ContributorLost(
                    f"{source.name} has no state of the outer optimizer after merge {version}",
                    machine=source.name,
                    hint="no action needed: the outer optimizer begins again",
                )
            groups.append((source.tensors, slots, partial(filled, self._client(one, folder), "rows")))
        self._whole.keep_outer(version, groups)

    # -- reading -------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="rows")
    @answers(SLOTS)
    def slots(self, folder: str) -> Slots | None:
        """Return the shapes of the tensors in a folder, by name; None if there is no such folder."""
        place = self._place(folder)
        if not place.is_dir():
            return None
        return WeightFolder(place).shapes() if any(place.glob("model*.safetensors")) else {}

    @ray.method(concurrency_group="rows")
    @answers(PIECES)
    def rows(self, folder: str, extents: bytes) -> list[Piece]:
        """Return rows of tensors in a folder, one piece for each extent (see `pack_extents`).

        Args:
            folder: path of the folder inside the aggregator's folder, such as ``updates/00000003``.
            extents: names and rows of the tensors.

        Raises:
            UserError: there is no such folder or tensor.
        """
        opened = WeightFolder(self._place(folder))
        pieces = [Piece.of_rows(extent.name, opened.read(*extent)) for extent in read_extents(extents)]
        self._traffic.send(sum(piece.content.nbytes for piece in pieces))
        return pieces

    def _place(self, folder: str) -> Path:
        if _FOLDERS.fullmatch(folder) is None:
            raise UserError(
                f"{folder[:40]!r} is no folder of a range", hint="run the same version everywhere"
            )
        return self._folder / folder


def _sources(named: Sequence[RemoteSource], actors: Sequence[Any]) -> Sources:
    """Return the sources of tensors; a tensor without a named source comes from the first source."""
    places = {name: place for place, source in enumerate(named) for name in source.tensors}
    found = (Source(actor, source.name, source.worker) for source, actor in zip(named, actors, strict=True))
    return Sources(tuple(found), places)


def new_folder() -> Path:
    """Return a new folder for the files of a range, and remove those that ended processes left.

    They are in a folder that only this user can access. Each has a file that its process locks while it runs. No folder
    is made while another process looks for unlocked folders.

    Raises:
        Unavailable: the folder belongs to another user, is a link, or cannot be made.
    """
    parent = private_folder(temporary_folder() / f"share-compute-ranges-{os.getuid()}")
    with _locked(parent / _LOCK, fcntl.LOCK_EX):
        for old in parent.iterdir():
            if old.is_dir() and not old.is_symlink():
                with suppress(OSError), _locked(old / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
        fcntl.flock(_opened(folder / _LOCK), fcntl.LOCK_EX)  # until this process ends
    return folder


@contextmanager
def _locked(file: Path, operation: int) -> Iterator[None]:
    """Lock a file; raise `OSError` for a link, or if ``operation`` must not wait and another process has the lock."""
    descriptor = _opened(file)
    try:
        fcntl.flock(descriptor, operation)
        yield
    finally:
        os.close(descriptor)


def _opened(file: Path) -> int:
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
