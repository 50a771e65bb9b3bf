"""Main loop of one replica: sends engine steps, processes their results, and changes stages when necessary.

One thread runs the loop. Other threads submit sequences through the `SchedulerService`, even while there are no stages.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import closing
from typing import Any, TypeAlias

from share_compute.errors import (
    ContributorLost,
    OutOfMemory,
    ShareComputeError,
    StaleEpoch,
    UserError,
    VerificationFailed,
    WrongTensor,
)
from share_compute.inference.scheduler.engine_steps import EngineStep, StepResult
from share_compute.lifecycle.computation import Computation
from share_compute.protocol.membership import Worker
from share_compute.topology import Topology
from share_compute_actors.inference.assembly import Assembly
from share_compute_actors.inference.messages import Trouble, unpack_to_server
from share_compute_actors.inference.scheduler_service import SchedulerService
from share_compute_actors.inference.status_recorder import StatusRecorder
from share_compute_actors.wire import Undeclared, undeclared

_POLL_S = 0.05
"""Longest wait for a message, in seconds."""
_WATCH_S = 0.02
"""Shortest time between two checks of the members while stages serve, in seconds."""
_STANDSTILL_S = 10.0
"""Time in seconds after which stages are broken up if results are due, none arrives and no member computes."""
_MOST_TROUBLES = 3
"""Number of `Trouble` reports without a sampled token in between after which sequences of the failed step fail."""
_log = logging.getLogger(__name__)

InboxItem: TypeAlias = tuple[Any, Any, Any] | Topology | Computation | bool | None
"""An item of the inbox, which is one of:

- messages: (claimed sender, key, encoded messages);
- the machines that may be used from now on;
- the stored choice between compiled and eager code;
- whether the replica stands by from now on;
- None, which means that there may be engine steps to send."""


class ReplicaRunner:
    """Runs one replica.

    Args:
        assembly: plans and forms the stages.
        service: the scheduler service with the sequences.
        status: status of the deployment.
        inbox: queue of messages.
        stopped: event that is set when the replica is stopped.
    """

    def __init__(
        self,
        assembly: Assembly,
        service: SchedulerService,
        status: StatusRecorder,
        inbox: queue.SimpleQueue[InboxItem],
        stopped: threading.Event,
    ) -> None:
        self._assembly = assembly
        self._service = service
        self._status = status
        self._inbox = inbox
        self._stopped = stopped
        self._sent: dict[int, EngineStep] = {}
        """Engine steps of this epoch whose results have not arrived, by id."""
        self._epoch = 0
        """Epoch of the engine steps in `_sent`."""
        self._watched_s = 0.0
        """Time of the last check of the members."""
        self._moved_s = 0.0
        """Last time at which there was no sign of a standstill; see `_notice_standstill`."""
        self._troubles = 0
        """Number of `Trouble` reports since the last sampled token, or since sequences failed because of them."""

    def run(self) -> None:
        """Serve until the replica is stopped; then end the members.

        Raises:
            Cancelled: the replica was stopped during a check of the members or a change of stages.
            UserError: the model cannot be served.
        """
        with closing(self._assembly):
            while not self._stopped.is_set():
                self._receive()
                self._send()
                if time.monotonic() - self._watched_s > _WATCH_S or self._assembly.placement is None:
                    self._watched_s = time.monotonic()
                    self._assembly.watch()
                    self._send()
                    self._notice_standstill()

    def _send(self) -> None:
        assembly = self._assembly
        if assembly.placement is None:
            return
        if assembly.epoch != self._epoch:
            self._epoch, self._moved_s = assembly.epoch, time.monotonic()
            self._sent.clear()
        steps = self._service.next_steps()
        if steps:
            self._sent.update((step.id, step) for step in steps)
            assembly.send(steps)

    def _notice_standstill(self) -> None:
        """Break up the stages if, for 10 s, results were due but none arrived and no member computed."""
        if not self._sent or self._assembly.placement is None or not self._assembly.is_idle:
            self._moved_s = time.monotonic()
        elif time.monotonic() - self._moved_s > _STANDSTILL_S:
            _log.warning("no member computes, although the results of %d steps are due", len(self._sent))
            self._assembly.break_up("no member computed the steps that were sent")

    def _receive(self) -> None:
        """Wait for a message, and process all messages that have arrived."""
        try:
            item = self._inbox.get(timeout=_POLL_S)
            while True:
                self._take(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take(self, item: InboxItem) -> None:
        if isinstance(item, Topology):
            self._assembly.offer(item)
        elif isinstance(item, Computation):
            self._assembly.choose_computation(item)
        elif item is True:
            self._assembly.stand_by()
        elif item is False:
            self._assembly.resume()
        elif item is not None:
            self._open(*item)

    def _open(self, worker: Any, key: Any, messages: Any) -> None:
        """Process messages that claim to come from a member; drop the messages if the key is wrong."""
        if not self._assembly.is_from(worker, key) or not isinstance(messages, list):
            return
        name = self._assembly.name(worker)
        for data in messages:
            try:
                message = unpack_to_server(data, name)
            except Undeclared as failure:
                self._assembly.accuse(worker, failure)
                return
            if message.epoch != self._assembly.epoch or self._assembly.placement is None:
                continue
            if isinstance(message, StepResult):
                if worker != self._assembly.placement.workers[-1]:
                    self._assembly.accuse(worker, undeclared(name, "tokens, though others draw them"))
                    return
                self._complete(message)
            else:
                self._trouble(worker, message)

    def _complete(self, result: StepResult) -> None:
        try:
            self._service.completed(result)
        except VerificationFailed as failure:
            self._again(failure)
            return
        self._sent.pop(result.step, None)
        self._moved_s = time.monotonic()
        if result.sampled:
            self._troubles = 0
            self._status.sampled()

    def _trouble(self, worker: Worker, trouble: Trouble) -> None:
        """Handle a member's `Trouble` report, and break up the stages."""
        failure = trouble.failure
        _log.warning("%s cannot continue: %s", self._assembly.name(worker), failure.message)
        self._troubles += 1
        if isinstance(failure, OutOfMemory):
            self._assembly.shrink(worker)
        elif isinstance(failure, (StaleEpoch, ContributorLost)):
            self._assembly.check_soon()
        elif isinstance(failure, WrongTensor):
            self._expel(failure.worker, accuser=worker)
        elif isinstance(failure, UserError) or self._troubles >= _MOST_TROUBLES:
            self._give_up(trouble.step, failure)
        self._again(failure)

    def _expel(self, worker: Worker, accuser: Worker) -> None:
        """Remove an accused member; if the accused member does not serve, count the accuser as lost instead."""
        assert self._assembly.placement is not None
        if worker in self._assembly.placement.workers:
            self._assembly.expel(worker)
        else:
            name = self._assembly.name(accuser)
            self._assembly.accuse(
                accuser, undeclared(name, "a wrong tensor of a machine that does not serve")
            )

    def _give_up(self, step_id: int | None, failure: ShareComputeError) -> None:
        """Fail sequences of a failed step: the one named by the error, else those that get a KV slot, else all."""
        step = self._sent.get(-1 if step_id is None else step_id)
        if step is not None:
            in_step = [chunk.sequence for chunk in step.chunks]
            begun = [opening.sequence for opening in step.opens]
            named = [
                sequence for sequence in (*begun, *in_step) if sequence == failure.details.get("sequence")
            ]
            self._service.fail(named or begun or in_step, failure)
            self._troubles = 0

    def _again(self, failure: ShareComputeError) -> None:
        self._assembly.break_up(failure.message)
