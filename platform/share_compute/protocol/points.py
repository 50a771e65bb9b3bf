"""The named points of the step protocol at which failures can be injected."""

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

    A point that ends in ``sending`` is passed before a message or tensor is sent. A point that ends in ``received`` is
    passed before the message or tensor is used.
    """

    halt_received = "member halt received"
    """A member receives `Halt`."""
    report_sending = "member report sending"
    """A member has halted, and is about to send its `Report`."""
    weights_loaded = "member weights loaded"
    """Weights were loaded into a member, which does not use them yet."""
    form_received = "member form received"
    """A member receives `Form`."""
    formed_sending = "member formed sending"
    """A member has begun the epoch, and is about to send `Formed`."""
    cell_starting = "member cell starting"
    """A member is about to run a cell, the forward or the backward of a microbatch."""
    cell_done = "member cell done"
    """A member has run a cell."""
    tensor_sending = "member tensor sending"
    """A member is about to send an activation, a gradient, or the gradient sum of a parameter of two stages."""
    tensor_received = "member tensor received"
    """A tensor arrived, and the member has not used it yet."""
    reduce_starting = "member reduce starting"
    """A member is about to carry out `Reduce`."""
    reduce_done = "member reduce done"
    """A member has the reduced gradient."""
    reduce_failed = "member reduce failed"
    """A reduction ended without a result."""
    broken_sending = "member broken sending"
    """A member is about to send `Broken` or `Rejected`."""
    log_sending = "member log sending"
    """A member is about to send its reduced gradient to a backup or a catch-up replica."""
    log_received = "member log received"
    """A backup or a catch-up replica has received a reduced gradient, and has not acknowledged it."""
    prepared_sending = "member prepared sending"
    """A member is about to send `Prepared`."""
    commit_received = "member commit received"
    """A member receives `Commit`."""
    apply_starting = "member apply starting"
    """A member is about to carry out `Apply`."""
    apply_done = "member apply done"
    """A member has carried out `Apply`."""
    applied_sending = "member applied sending"
    """A member pauses, and is about to send `Applied`."""
    proceed_received = "member proceed received"
    """A member receives `Proceed`."""

    epoch_recording = "coordinator epoch recording"
    """The coordinator is about to record a new epoch."""
    epoch_recorded = "coordinator epoch recorded"
    """The step log has the new epoch; no member was notified."""
    halt_sending = "coordinator halt sending"
    """The coordinator is about to send `Halt` to one member."""
    report_received = "coordinator report received"
    """The coordinator receives a `Report`."""
    planning = "coordinator planning"
    """The coordinator is about to plan the membership."""
    planned = "coordinator planned"
    """The planning has ended; no member has received `Form` for the new epoch."""
    form_sending = "coordinator form sending"
    """The coordinator is about to send `Form` to one member."""
    formed_received = "coordinator formed received"
    """The coordinator receives `Formed`."""
    prepared_received = "coordinator prepared received"
    """The coordinator receives `Prepared`."""
    broken_received = "coordinator broken received"
    """The coordinator receives `Broken` or `Rejected`."""
    step_recording = "coordinator step recording"
    """All members are prepared; the step is not recorded."""
    step_recorded = "coordinator step recorded"
    """The step is recorded, so it is committed; no member was notified."""
    commit_sending = "coordinator commit sending"
    """The coordinator is about to send `Commit` to one member."""
    applied_received = "coordinator applied received"
    """The coordinator receives `Applied`."""
    pausing = "coordinator pausing"
    """All members pause."""
    proceed_sending = "coordinator proceed sending"
    """The coordinator is about to send `Proceed` to one member."""

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
"""Point that the sender of a message passes, by message type."""

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
