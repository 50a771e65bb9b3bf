"""The model checker finds defects that are put into the protocol on purpose, which shows that its checks work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from tests.simulated_world.record import DurableRecord
from tests.simulated_world.scenario import draw, draw_wrong
from tests.simulated_world.symbols import Gradient, SymbolicModel
from tests.simulated_world.world import World

from share_compute.errors import VerificationFailed
from share_compute.protocol.coordinator import (
    Blame,
    CoordinatorMachine,
    Recorded,
    Superseded,
    Tick,
    WriteStepLog,
)
from share_compute.protocol.coordinator import Effect as CoordinatorEffect
from share_compute.protocol.doubts import Accusations
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import (
    Apply,
    Arrived,
    Computed,
    Discard,
    Effect,
    Log,
    Misfit,
    Reduced,
    ReduceFailed,
)
from share_compute.protocol.messages import Commit, Form, Halt, Rejected, Report, ToCoordinator
from share_compute.protocol.tree import Node

SEEDS = 3000


class AppliesTwice(MemberMachine):
    def _on_commit(self, commit: Commit) -> list[Effect]:
        if commit.step == self.applied and self._phase == "prepared":
            return self._start(Apply(commit.step, commit.scale))
        return super()._on_commit(commit)


class AppliesBeforeCommit(MemberMachine):
    def _prepare(self) -> list[Effect]:
        effects = super()._prepare()
        return effects if self._running else effects + self._start(Apply(self._step.number, 1.0))


class AcceptsOldEpochs(MemberMachine):
    def _on_message(self, event: Any) -> list[Effect]:
        return super()._on_message(replace(event, epoch=self.epoch) if hasattr(event, "epoch") else event)


class ReportsSpoiltSums(MemberMachine):
    def _on_reduction_ended(self, ended: Reduced | ReduceFailed) -> list[Effect]:
        summed = set(self._step.summed)
        effects = super()._on_reduction_ended(ended)
        self._step.summed |= summed
        return [
            replace(effect, message=self._report())
            if isinstance(getattr(effect, "message", None), Report)
            else effect
            for effect in effects
        ]


class PreparesWithoutTheOtherHalf(MemberMachine):
    def _tie(self, *, sends: bool = False) -> list[Effect]:
        effects = super()._tie(sends=sends)
        return effects + (self._complete() if sends and self._phase == "tying" else [])


class AppliesHalfOnHalt(MemberMachine):
    def _settle(self) -> list[Effect]:
        self._step.is_complete |= self._step.is_reduced
        return super()._settle()


class DoesNotWaitForTheBackup(MemberMachine):
    def _log(self) -> list[Effect]:
        return [effect for effect in super()._log() if not isinstance(effect, Log)] + self._prepare()


class WaitsForTheFirstCopyAlone(MemberMachine):
    def _unlogged(self) -> list[Log]:
        return [] if self._logged else super()._unlogged()


class SendsNothingAgain(MemberMachine):
    def _on_form(self, form: Form) -> list[Effect]:
        return super()._on_form(replace(form, membership=replace(form.membership, resends=())))


class KeepsEverything(MemberMachine):
    def _on_form(self, form: Form) -> list[Effect]:
        step = self._step
        effects = super()._on_form(replace(form, keeps_step=True))
        return [effect for effect in effects if not isinstance(effect, Discard)] if step.summed else effects


class ForgetsNothing(MemberMachine):
    def _on_form(self, form: Form) -> list[Effect]:
        return super()._on_form(replace(form, membership=replace(form.membership, forgets=frozenset())))


class ComputesInItsOwnOrder(MemberMachine):
    def _next(self) -> list[Effect]:
        if self._running is None and self.worker != "a":
            self._waiting.sort(key=lambda action: (-action.microbatch, action.kind == "B"))
        return super()._next()


class UsesWhatItShouldReject(MemberMachine):
    def _on_message(self, event: Any) -> list[Effect]:
        return super()._on_message(Arrived(event.epoch, event.label) if isinstance(event, Misfit) else event)


class TakesTheBlame(MemberMachine):
    def _reject(self, source: str, *arguments: Any, **options: Any) -> list[Effect]:
        return super()._reject(self.worker or source, *arguments, **options)


class KeepsEarlierGenerations(MemberMachine):
    def _on_form(self, form: Form) -> list[Effect]:
        return super()._on_form(replace(form, generation=self._step.generation))


class AppliesEarlierGenerations(MemberMachine):
    def _on_halt(self, halt: Halt) -> list[Effect]:
        return super()._on_halt(replace(halt, generation=self._step.generation))


class FindsAllFinite(MemberMachine):
    def _on_computed(self, computed: Computed) -> list[Effect]:
        return super()._on_computed(replace(computed, is_finite=True))


class AcceptsOldReports(CoordinatorMachine):
    def _on_message(self, message: ToCoordinator) -> list[CoordinatorEffect]:
        return super()._on_message(replace(message, epoch=self.epoch))


class CommitsWhenSomeArePrepared(CoordinatorMachine):
    def _if_all_answered(self) -> list[CoordinatorEffect]:
        if self._phase == "stepping" and self._prepared:
            self._answered = set(self.workers)
        return super()._if_all_answered()


class CommitsWithoutRecord(CoordinatorMachine):
    def _if_all_answered(self) -> list[CoordinatorEffect]:
        effects = super()._if_all_answered()
        records = [effect for effect in effects if isinstance(effect, WriteStepLog)]
        return (
            self._on_recorded(Recorded(self.epoch, self.committed + 1, self._scale)) if records else effects
        )


class BelievesWhatItRead(CoordinatorMachine):
    def _on_recorded(self, recorded: Recorded) -> list[CoordinatorEffect]:
        known = self._phase == "recording epoch"
        return super()._on_recorded(replace(recorded, committed=self.committed) if known else recorded)


class ForgetsTheScale(CoordinatorMachine):
    def _on_recorded(self, recorded: Recorded) -> list[CoordinatorEffect]:
        return super()._on_recorded(replace(recorded, scale=1.0))


class NeverRepeatsItself(CoordinatorMachine):
    def handle(self, event: Any) -> list[CoordinatorEffect]:
        return [] if isinstance(event, Tick) else super().handle(event)


class BlamesWhoComplains(CoordinatorMachine):
    def _on_rejected(self, rejected: Rejected) -> list[CoordinatorEffect]:
        return super()._on_rejected(replace(rejected, source=rejected.worker))


class BlamesBeforeTheModelIsCleared(CoordinatorMachine):
    def _on_rejected(self, rejected: Rejected) -> list[CoordinatorEffect]:
        return super()._on_rejected(replace(rejected, is_certain=True))


class BlamesTheModel(CoordinatorMachine):
    def _on_rejected(self, rejected: Rejected) -> list[CoordinatorEffect]:
        self._doubts.suspect = self._doubts.suspect or "nobody"
        return super()._on_rejected(rejected)


class BelievesOneMemberAgain(CoordinatorMachine):
    def _on_rejected(self, rejected: Rejected) -> list[CoordinatorEffect]:
        self.accusations = Accusations()
        return super()._on_rejected(rejected)


class ForgetsWhoAccuses(CoordinatorMachine):
    def handle(self, event: Any) -> list[CoordinatorEffect]:
        return [
            replace(effect, accuser=None) if isinstance(effect, Blame) else effect
            for effect in super().handle(event)
        ]


class ComparesNoDigests(CoordinatorMachine):
    def _judge(self) -> list[CoordinatorEffect]:
        self._prepared = {worker: replace(each, digest="") for worker, each in self._prepared.items()}
        return super()._judge()


class BlamesTheMajority(CoordinatorMachine):
    def _expel(self, workers: frozenset[str]) -> list[CoordinatorEffect]:
        others = frozenset(self.workers) - workers
        return super()._expel(others or workers)


class CountsWhatWasStartedOver(CoordinatorMachine):
    def _plan(self) -> CoordinatorEffect:
        return replace(super()._plan(), reports=dict(self._reports))


class ForgetsTheGeneration(CoordinatorMachine):
    def _on_recorded(self, recorded: Recorded) -> list[CoordinatorEffect]:
        return super()._on_recorded(replace(recorded, generation=0))


class NeverStartsOver(CoordinatorMachine):
    def _change(self) -> list[CoordinatorEffect]:
        self._doubts.generation = 0
        return super()._change()


MEMBERS = [
    AppliesTwice,
    AppliesBeforeCommit,
    AcceptsOldEpochs,
    ReportsSpoiltSums,
    PreparesWithoutTheOtherHalf,
    AppliesHalfOnHalt,
    DoesNotWaitForTheBackup,
    WaitsForTheFirstCopyAlone,
    SendsNothingAgain,
    KeepsEverything,
    ForgetsNothing,
    ComputesInItsOwnOrder,
    UsesWhatItShouldReject,
    TakesTheBlame,
    KeepsEarlierGenerations,
    AppliesEarlierGenerations,
    FindsAllFinite,
]
COORDINATORS = [
    CommitsWhenSomeArePrepared,
    CommitsWithoutRecord,
    AcceptsOldReports,
    BelievesWhatItRead,
    ForgetsTheScale,
    NeverRepeatsItself,
    BlamesWhoComplains,
    BlamesBeforeTheModelIsCleared,
    BlamesTheModel,
    BelievesOneMemberAgain,
    ForgetsWhoAccuses,
    ComparesNoDigests,
    BlamesTheMajority,
    CountsWhatWasStartedOver,
    ForgetsTheGeneration,
    NeverStartsOver,
]


def first_found(
    new_member: Callable[[str, int], MemberMachine] = MemberMachine,
    new_coordinator: type[CoordinatorMachine] = CoordinatorMachine,
) -> str:
    """Return the error of the first schedule that finds the defect."""
    for seed, scenario in chain.from_iterable(
        ((seed, draw(seed)), (seed, draw_wrong(seed))) for seed in range(SEEDS)
    ):
        try:
            World(scenario, new_member, new_coordinator).run()
        except (VerificationFailed, AssertionError, KeyError, ValueError, IndexError) as found:
            return f"seed {seed}: {found!r}"
    pytest.fail(f"not found in {SEEDS} schedules")


@pytest.mark.parametrize("broken", MEMBERS)
def test_broken_members_are_found(broken: type[MemberMachine]) -> None:
    assert first_found(new_member=broken)


@pytest.mark.parametrize("broken", COORDINATORS)
def test_broken_coordinators_are_found(broken: type[CoordinatorMachine]) -> None:
    assert first_found(new_coordinator=broken)


def test_a_record_that_refuses_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(self: DurableRecord, record: WriteStepLog) -> Recorded | Superseded:
        self.epoch = max(self.epoch, record.epoch)
        if record.step is not None:
            self.committed, self.scale = record.step, record.scale
        return Recorded(record.epoch, self.committed, self.scale)

    monkeypatch.setattr(DurableRecord, "write", write)
    assert first_found()


def test_sums_in_the_order_of_arrival_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(self: SymbolicModel, held: dict[Node, Gradient], _: Node, gradient: Gradient) -> None:
        whole = dict(gradient)
        for part in held.values():
            whole = {layer: self.add(part[layer], whole[layer]) for layer in whole}
        held.clear()
        held[self.tree.root] = whole

    monkeypatch.setattr(SymbolicModel, "merge", merge)
    assert first_found()
