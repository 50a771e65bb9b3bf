"""After a loss, no cell is computed again if a member has its result."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from share_compute.protocol.membership import Resend, Task
from share_compute.protocol.messages import Report
from share_compute.protocol.recovery import StepRecovery, recover

STAGES = (("a", "b"), ("c", "d"))
OWNERS = (("a", "a", "b", "b"), ("c", "c", "d", "d"))


def report(worker: str, **held: Any) -> Report:
    sets = {
        name: frozenset(value) if isinstance(value, (set, range)) else value for name, value in held.items()
    }
    return Report(**{"epoch": 1, "worker": worker, "applied": 4, "step": 5, **sets})


def after(*reports: Report, stages: Any = STAGES, owners: Any = OWNERS) -> StepRecovery:
    return recover(stages, owners, {each.worker: each for each in reports}, 5)


def done(worker: str, ids: set[int]) -> Report:
    """A member that has run these microbatches, forward and backward."""
    return report(worker, summed=ids, activations=ids, gradients=ids)


def work(recovery: StepRecovery) -> set[tuple[str, int, int, str]]:
    """Return the cells that run: forward or backward, stage, microbatch, member."""
    return {
        (kind, place, microbatch, task.worker)
        for place, row in enumerate(recovery.tasks)
        for microbatch, task in enumerate(row)
        for kind, is_run in (("F", task.forward), ("B", task.backward))
        if is_run
    }


def test_with_nothing_held_everything_is_run_once() -> None:
    recovery = after()
    assert len(work(recovery)) == 2 * 2 * 4
    assert all(task.adds for row in recovery.tasks for task in row)
    assert recovery.resends == ()


def test_with_everything_held_nothing_is_run() -> None:
    recovery = after(done("a", {0, 1}), done("b", {2, 3}), done("c", {0, 1}), done("d", {2, 3}))
    assert work(recovery) == set()
    assert recovery.resends == ()


def test_a_lost_member_of_the_first_stage_needs_only_kept_gradients() -> None:
    recovery = after(
        done("b", {2, 3}),
        done("c", {0, 1}),
        done("d", {2, 3}),
        stages=(("b",), ("c", "d")),
        owners=(("b",) * 4, OWNERS[1]),
    )
    assert work(recovery) == {("F", 0, 0, "b"), ("B", 0, 0, "b"), ("F", 0, 1, "b"), ("B", 0, 1, "b")}
    assert set(recovery.resends) == {Resend("c", "gradient", 0, 1, "b"), Resend("c", "gradient", 1, 1, "b")}


def test_a_lost_member_of_the_last_stage_needs_only_kept_activations() -> None:
    recovery = after(
        done("a", {0, 1}),
        done("b", {2, 3}),
        done("c", {0, 1}),
        stages=(("a", "b"), ("c",)),
        owners=(OWNERS[0], ("c",) * 4),
    )
    assert work(recovery) == {("F", 1, 2, "c"), ("B", 1, 2, "c"), ("F", 1, 3, "c"), ("B", 1, 3, "c")}
    assert set(recovery.resends) == {
        Resend("b", "activation", 2, 0, "c"),
        Resend("b", "activation", 3, 0, "c"),
    }


def test_what_is_run_forward_is_only_run_backward_and_where_it_was() -> None:
    recovery = after(
        report("b", forwarded={1}, activations={1}), done("c", {1}), owners=(("a",) * 4, OWNERS[1])
    )
    assert recovery.tasks[0][1] == Task("b", forward=False)


def test_lost_gradients_of_the_boundary_are_computed_again_without_being_added() -> None:
    """The later stage has its sum, but the member that sent the gradients is lost."""
    recovery = after(
        report("d", is_reduced=True), stages=(("a", "b"), ("d",)), owners=(OWNERS[0], ("d",) * 4)
    )
    assert recovery.reduced == {1: ("d",)}
    assert recovery.tasks[1] == tuple(Task("d", adds=False) for _ in range(4))
    assert all(task.adds for task in recovery.tasks[0])


def test_lost_activations_are_computed_again_without_a_backward() -> None:
    recovery = after(report("a", summed={0}, gradients={0}), done("b", {1, 2, 3}), done("d", {1, 2, 3}))
    task = recovery.tasks[0][0]
    assert task == Task(task.worker, forward=True, backward=False, adds=False, holder="a")
    assert recovery.tasks[1][0].forward


def test_reports_of_another_step_say_nothing() -> None:
    assert after(report("a", step=4, summed={0, 1})) == after()


def test_a_member_that_was_unresponsive_forgets_what_others_recomputed() -> None:
    recovery = after(done("a", {0, 1}), done("b", {1, 2, 3}), done("c", {0, 1}), done("d", {2, 3}))
    assert recovery.forgets == {"a"}
    assert {entry for entry in work(recovery) if entry[1] == 0} == {
        ("F", 0, 0, recovery.tasks[0][0].worker),
        ("B", 0, 0, recovery.tasks[0][0].worker),
    }


held_ids = st.frozensets(st.integers(0, 3))


@st.composite
def reports(draw: st.DrawFn) -> list[Report]:
    """Draw reports: a member that ran a backward ran the forward, and keeps both until a reduction spoils them."""
    found = []
    for stage in STAGES:
        for worker in draw(st.sets(st.sampled_from(stage))):
            forwarded, gone = draw(held_ids), draw(held_ids)
            summed = gone if not draw(st.booleans()) else frozenset()
            found.append(
                report(
                    worker,
                    summed=summed,
                    forwarded=forwarded - gone,
                    activations=forwarded | gone,
                    gradients=gone,
                    is_reduced=draw(st.booleans()) and draw(st.booleans()),
                )
            )
    return found


@given(reports())
def test_every_stage_gets_its_whole_gradient_and_every_cell_its_inputs(held: list[Report]) -> None:
    recovery = after(*held)
    by_worker = {each.worker: each for each in held if each.worker not in recovery.forgets}
    resent = {(each.cargo, each.microbatch, each.stage) for each in recovery.resends}
    for place, (stage, row) in enumerate(zip(STAGES, recovery.tasks, strict=True)):
        own = [by_worker[worker] for worker in stage if worker in by_worker]
        for microbatch, task in enumerate(row):
            counted = sum(microbatch in each.summed for each in own) + task.adds
            assert (task.holder is None) == (counted == task.adds)
            assert counted == 1 or place in recovery.reduced
            assert not (task.adds and place in recovery.reduced)
            assert task.backward or not task.adds
            if task.backward and not task.forward:
                assert microbatch in by_worker[task.worker].forwarded
            if task.forward and place > 0:
                before = recovery.tasks[place - 1][microbatch]
                assert before.forward or ("activation", microbatch, place - 1) in resent
            if task.backward and place + 1 < len(STAGES):
                behind = recovery.tasks[place + 1][microbatch]
                assert behind.backward or ("gradient", microbatch, place + 1) in resent
    for resend in recovery.resends:
        kept = by_worker[resend.holder]
        assert resend.microbatch in (kept.activations if resend.cargo == "activation" else kept.gradients)


def test_a_reduced_share_counts_only_with_all_others_of_its_stage() -> None:
    reports = [
        report(worker, summed=ids, activations=ids, gradients=ids, is_reduced=worker != "d")
        for worker, ids in (("a", {0, 1}), ("b", {2, 3}), ("c", {0, 1}), ("d", {2, 3}))
    ]
    recovery = recover(STAGES, OWNERS, {each.worker: each for each in reports}, 5, shares_optimizer=True)
    assert recovery.reduced == {0: ("a", "b")}
    assert recovery.forgets == {"c"}
    lost = {microbatch for kind, place, microbatch, _ in work(recovery) if (kind, place) == ("B", 1)}
    assert lost == {0, 1}
