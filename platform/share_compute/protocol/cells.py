"""Derives from a `Membership` the cells that each member runs, and the tensors that these cells need and send.

A cell is the forward or the backward of one microbatch in one stage.
"""

from __future__ import annotations

from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import TensorLabel
from share_compute.protocol.schedule import Action, in_order, round_the_blocks, windows


def remaining(membership: Membership, step: int, worker: Worker) -> list[Action]:
    """Return the actions that one member still has to run in a step, in 1F1B order.

    Slices of the same part of a batch follow each other. All members of a stage take the parts in the same order.
    """
    stage = membership.stage_of(worker)
    if membership.slices > 1:
        parts = range(membership.parts)
        return [
            Action(action.kind, microbatch)
            for action in in_order(parts, len(membership.stages) - 1 - stage, parts)
            for microbatch in membership.together(worker, action.microbatch)
        ]
    widest = max(range(len(membership.stages)), key=lambda place: len(membership.stages[place]))
    owned = [
        [microbatch for microbatch, owner in enumerate(membership.owners[widest]) if owner == member]
        for member in membership.stages[widest]
    ]
    tasks = {
        microbatch: task
        for microbatch, task in enumerate(membership.tasks_of(step)[stage])
        if task.worker == worker
    }
    window = windows([len(members) for members in membership.stages])[stage]
    return [
        action
        for action in in_order(round_the_blocks(owned), window, tasks)
        if (tasks[action.microbatch].forward if action.kind == "F" else tasks[action.microbatch].backward)
    ]


def holders(membership: Membership, step: int, stage: int) -> list[list[int]]:
    """Return the microbatches whose gradients each member of a stage holds when the step's cells are done."""
    tasks = membership.tasks_of(step)[stage]
    held = [task.worker if task.adds else task.holder for task in tasks]
    return [
        [microbatch for microbatch, holder in enumerate(held) if holder == worker]
        for worker in membership.stages[stage]
    ]


def needed(membership: Membership, step: int, stage: int, action: Action) -> TensorLabel | None:
    """Return the tensor that a cell must receive from another member before it can run; None if it needs none."""
    if action.kind == "F":
        return TensorLabel(step, "activation", action.microbatch, stage - 1) if stage > 0 else None
    return (
        TensorLabel(step, "gradient", action.microbatch, stage + 1)
        if stage + 1 < len(membership.stages)
        else None
    )


def delivery(
    membership: Membership, step: int, stage: int, action: Action
) -> tuple[TensorLabel, Worker] | None:
    """Return (label, receiver) of a cell's output.

    Return None if no other cell needs the output, or if a kept copy is sent instead (`Membership.resends`).
    """
    tasks = membership.tasks_of(step)
    if action.kind == "F":
        label = TensorLabel(step, "activation", action.microbatch, stage)
        target = tasks[stage + 1][action.microbatch] if stage + 1 < len(tasks) else None
        is_wanted = target is not None and target.forward
    else:
        label = TensorLabel(step, "gradient", action.microbatch, stage)
        target = tasks[stage - 1][action.microbatch] if stage > 0 else None
        is_wanted = target is not None and target.backward
    if target is None or not is_wanted:
        return None
    is_sent_again = step == membership.step and any(
        (resend.cargo, resend.microbatch, resend.stage) == label[1:] for resend in membership.resends
    )
    return None if is_sent_again else (label, target.worker)
