"""No two members wait for each other, for any ownership and any set of finished cells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from share_compute.protocol.cells import delivery, needed, remaining
from share_compute.protocol.membership import Membership, fresh
from share_compute.protocol.messages import Report, TensorLabel
from share_compute.protocol.recovery import recover
from share_compute.protocol.schedule import Action

STEP = 5


@st.composite
def memberships(draw: st.DrawFn) -> Membership:
    """Stages of any size, any owners of microbatches, and an open step in which any cells are done."""
    count = draw(st.integers(1, 8))
    stages = tuple(
        tuple(f"{place}{member}" for member in range(draw(st.integers(1, 3))))
        for place in range(draw(st.integers(1, 4)))
    )
    owners = tuple(tuple(draw(st.sampled_from(stage)) for _ in range(count)) for stage in stages)
    ids = st.frozensets(st.integers(0, count - 1))
    reports = {}
    for worker in (worker for stage in stages for worker in stage):
        forwarded, gone = draw(ids), draw(ids)
        reports[worker] = Report(
            epoch=1,
            worker=worker,
            applied=STEP - 1,
            step=draw(st.sampled_from([STEP, STEP - 1])),
            summed=gone if draw(st.booleans()) else frozenset(),
            forwarded=forwarded - gone,
            activations=forwarded | gone,
            gradients=gone,
        )
    left = recover(stages, owners, reports, STEP)
    return Membership(
        epoch=2,
        shards=tuple((place, place + 1) for place in range(len(stages))),
        stages=stages,
        owners=owners,
        step=STEP,
        tasks=left.tasks,
        resends=left.resends,
        forgets=left.forgets,
        reduced=left.reduced,
    )


def walk(membership: Membership, step: int) -> set[tuple[int, Action]]:
    """Let all members compute until none can continue; return the cells that were computed."""
    waiting = {worker: remaining(membership, step, worker) for worker in membership.workers}
    arrived = {
        (resend.target, TensorLabel(step, resend.cargo, resend.microbatch, resend.stage))
        for resend in membership.resends
        if step == membership.step
    }
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for worker, actions in waiting.items():
            stage = membership.stage_of(worker)
            while actions:
                need = needed(membership, step, stage, actions[0])
                if need is not None and (worker, need) not in arrived:
                    break
                action = actions.pop(0)
                assert (stage, action) not in done
                done.add((stage, action))
                sent = delivery(membership, step, stage, action)
                if sent is not None:
                    assert (sent[1], sent[0]) not in arrived
                    arrived.add((sent[1], sent[0]))
                moved = True
    assert not any(waiting.values())
    return done


@given(memberships())
def test_the_open_step_ends_with_what_was_left_of_it(membership: Membership) -> None:
    assert walk(membership, STEP) == {
        (place, Action(kind, microbatch))
        for place, row in enumerate(membership.tasks)
        for microbatch, task in enumerate(row)
        for kind, is_run in (("F", task.forward), ("B", task.backward))
        if is_run
    }


@given(memberships())
def test_later_steps_compute_every_cell_once(membership: Membership) -> None:
    assert membership.tasks_of(STEP + 1) == fresh(membership.owners)
    assert len(walk(membership, STEP + 1)) == 2 * len(membership.stages) * len(membership.owners[0])
