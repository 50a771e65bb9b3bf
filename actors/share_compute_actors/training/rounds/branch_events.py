"""Reports events of branches as events of their job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from share_compute.lifecycle.attempt_events import (
    AttemptEvent,
    LayersTimed,
    LinkCut,
    Note,
    Offended,
    Planned,
    Reformed,
    ReplanAbandoned,
    Started,
    StepCommitted,
    Validated,
)
from share_compute.planning.plan import Plan
from share_compute.training.metrics import Figures
from share_compute_actors.training.rounds.branch_attempt import BranchAttempt

_OF_ANY_BRANCH = (Note, LayersTimed, Offended, LinkCut)


class BranchEvents:
    """Reports events of branches as events of their job: the steps of the first branch, and the plans of all.

    Args:
        branches: the branches of the job; the list may still be empty.
        report: receives the events of the job.
        known_step: last step of the first branch that the control plane knows.
    """

    def __init__(
        self, branches: Sequence[BranchAttempt], report: Callable[[AttemptEvent], None], known_step: int
    ) -> None:
        self._branches = branches
        self._report = report
        self.known_step = known_step
        """Last step of the first branch that the control plane knows."""
        self.validations: list[tuple[int, Figures]] = []
        """Step and metrics of each validation."""
        self._has_planned = False

    def pass_on(self, branch: BranchAttempt, event: AttemptEvent) -> None:
        """Report an event of a branch if it concerns the whole job."""
        if isinstance(event, Started):
            branch.has_begun = True
        if isinstance(event, Planned):
            branch.plan = event.plan
            if all(each.plan is not None for each in self._branches if each.begins_later is None):
                self._has_planned = True
                self._report(Planned(plan=self._plan))
        elif isinstance(event, Reformed):
            branch.plan = event.plan
            sentence = f"branch {branch.number}: {event.sentence}"
            if self._has_planned:
                self._report(event.model_copy(update={"plan": self._plan, "sentence": sentence}))
        elif isinstance(event, Note) and branch.number:
            self._report(event.model_copy(update={"message": f"branch {branch.number}: {event.message}"}))
        elif isinstance(event, _OF_ANY_BRANCH):
            self._report(event)
        elif branch.number == 0 and not isinstance(event, ReplanAbandoned):
            self._report(self._of_all(event))

    def _of_all(self, event: AttemptEvent) -> AttemptEvent:
        """Return an event of the first branch with the figures of all branches."""
        if isinstance(event, Validated) and event.split == "validation":
            # A restarted branch repeats validations that were reported already.
            earlier = [(step, figures) for step, figures in self.validations if step < event.step]
            self.validations = [*earlier, (event.step, event.figures())]
        if isinstance(event, StepCommitted):
            self.known_step = event.step
            factor = len(self._branches)
            return event.model_copy(
                update={
                    "samples": event.samples * factor,
                    "tokens": event.tokens * factor,
                    "tokens_per_s": event.tokens_per_s * factor,
                }
            )
        return event

    @property
    def _plan(self) -> Plan:
        """Return the plan of the job: the plan of the first branch, with the stages of all branches."""
        planned = [branch for branch in self._branches if branch.plan is not None]
        first = planned[0].plan
        assert first is not None
        branches = tuple(branch.branch_plan for branch in planned)
        used = {
            member.contributor_id for each in branches for stage in each.stages for member in stage.members
        }
        idle = tuple(machine for machine in first.idle if machine.contributor_id not in used)
        return first.model_copy(update={"branches": branches, "idle": idle})
