"""The named points of the step protocol at which failures are injected, in simulated and in real processes."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

from share_compute.protocol.messages import (
    Applied,
    Broken,
    Commit,
    Form,
    Formed,
    Halt,
    Prepared,
    Proceed,
    Rejected,
    Report,
    ToCoordinator,
    ToMember,
)


class Point(StrEnum):
    """A point of the protocol that a member or the coordinator passes.

    Points whose name ends in ``sending`` are passed once for each message, before it is sent. If the process is killed
    there, no process receives the message.
    """

    halt_received = "member halt received"
    """A member was notified of a new epoch, and has not halted yet."""
    report_sending = "member report sending"
    """A member has halted; the coordinator does not know the member's results."""
    weights_loaded = "member weights loaded"
    """Weights were loaded into a member; it has not begun an epoch with them."""
    form_received = "member form received"
    """A member received the membership, and has not begun the epoch."""
    formed_sending = "member formed sending"
    """A member has begun the epoch; the coordinator does not know it."""
    cell_starting = "member cell starting"
    """A member has the inputs of a cell, and begins the cell."""
    cell_done = "member cell done"
    """A cell is done: only this member has its result."""
    tensor_sending = "member tensor sending"
    """An activation, a gradient or the gradient sum of a tied parameter is to be sent to another member."""
    tensor_received = "member tensor received"
    """A tensor arrived, and is not processed yet."""
    reduce_starting = "member reduce starting"
    """A member has run its cells, and is about to carry out `Reduce`."""
    reduce_done = "member reduce done"
    """A member has the reduced gradient; its peers may not."""
    reduce_failed = "member reduce failed"
    """A reduction ended without a result.

    The member has lost its own sums, unless it held the result before or had exchanged no data yet.
    """
    broken_sending = "member broken sending"
    """The coordinator does not know that a reduction failed, or that a tensor was lost or rejected."""
    log_sending = "member log sending"
    """A member has the reduced gradient; its backup or catch-up replica does not."""
    log_received = "member log received"
    """The backup or catch-up replica has the reduced gradient; the sender has no acknowledgement yet."""
    prepared_sending = "member prepared sending"
    """A member is prepared; the coordinator does not know it."""
    commit_received = "member commit received"
    """A member was notified that the step is recorded, and has not applied it."""
    apply_starting = "member apply starting"
    """A member is about to change its weights."""
    apply_done = "member apply done"
    """The weights are changed; no other process knows it."""
    applied_sending = "member applied sending"
    """A member pauses; the coordinator does not know it."""
    proceed_received = "member proceed received"
    """A member was notified that the pause is over."""

    epoch_recording = "coordinator epoch recording"
    """The coordinator is about to record a new epoch."""
    epoch_recorded = "coordinator epoch recorded"
    """The step log has the new epoch; no member was notified."""
    halt_sending = "coordinator halt sending"
    """Some members may have been notified to halt; the next one has not."""
    report_received = "coordinator report received"
    """A member's report arrived."""
    planning = "coordinator planning"
    """All reports have arrived; no plan is made yet."""
    planned = "coordinator planned"
    """The membership is planned, and members have loaded missing weights; no member has received `Form`."""
    form_sending = "coordinator form sending"
    """Some members may have received the membership; the next one has not."""
    formed_received = "coordinator formed received"
    """The coordinator was notified that a member has begun the epoch."""
    prepared_received = "coordinator prepared received"
    """The coordinator was notified that a member is prepared; when all members are, it records the step."""
    broken_received = "coordinator broken received"
    """A member reported that its reduction failed, or that a tensor was lost or rejected."""
    step_recording = "coordinator step recording"
    """All members are prepared; the step is not recorded."""
    step_recorded = "coordinator step recorded"
    """The step is recorded, so it is committed; no member was notified."""
    commit_sending = "coordinator commit sending"
    """Some members may have been notified of the commit; the next one has not."""
    applied_received = "coordinator applied received"
    """The coordinator was notified that a member pauses."""
    pausing = "coordinator pausing"
    """All members pause; no other component was notified."""
    proceed_sending = "coordinator proceed sending"
    """Some members may have been notified that the pause is over; the next one has not."""

    @property
    def role(self) -> Literal["member", "coordinator"]:
        """Role of the process that passes the point."""
        return "member" if self.startswith("member") else "coordinator"

    @property
    def is_sending(self) -> bool:
        """Whether a message or tensor is sent at the point, so that it can be delayed, dropped or corrupted there."""
        return self.endswith("sending")


SENDING: Mapping[type[ToCoordinator | ToMember], Point] = {
    Halt: Point.halt_sending,
    Form: Point.form_sending,
    Commit: Point.commit_sending,
    Proceed: Point.proceed_sending,
    Report: Point.report_sending,
    Formed: Point.formed_sending,
    Prepared: Point.prepared_sending,
    Broken: Point.broken_sending,
    Rejected: Point.broken_sending,
    Applied: Point.applied_sending,
}
"""Fault-injection point that a process reaches before it sends a message, by message type."""

RECEIVED: Mapping[type[ToCoordinator | ToMember], Point] = {
    Halt: Point.halt_received,
    Form: Point.form_received,
    Commit: Point.commit_received,
    Proceed: Point.proceed_received,
    Report: Point.report_received,
    Formed: Point.formed_received,
    Prepared: Point.prepared_received,
    Broken: Point.broken_received,
    Rejected: Point.broken_received,
    Applied: Point.applied_received,
}
"""Point that the receiver of a message passes, by message type."""
