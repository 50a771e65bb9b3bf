"""The server of a deployment: one actor on the head that accepts sequences and returns their events.

The control plane imports this module. Neither this module nor the main loop in `deployment` imports torch, so that a
new server takes over members without delay.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

import ray
from pydantic import TypeAdapter

from share_compute.errors import ShareComputeError, Unavailable, as_ours
from share_compute.inference.placement import limits_before
from share_compute.inference.scheduler.events import write_events
from share_compute.inference.scheduler.options import Generation
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.topology import Topology
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.inference.assignment import ServingAssignment
from share_compute_actors.inference.scheduler_service import SchedulerService
from share_compute_actors.inference.status_recorder import StatusRecorder
from share_compute_actors.machine.stalled import close_stalled_connections
from share_compute_actors.unpickling import refuse_pickles
from share_compute_actors.wire import NOTHING, answers_by

topologies: TypeAdapter[Topology] = TypeAdapter(Topology)
"""Reads and writes topologies that are offered to a server, as JSON."""
generations_adapter: TypeAdapter[list[Generation]] = TypeAdapter(list[Generation])
"""Reads and writes the sequences of a request as JSON."""
_log = logging.getLogger(__name__)


@ray.remote(num_cpus=0, concurrency_groups={"run": 1, "control": 4, "requests": 4, "pull": 2, "mail": 1})
class DeploymentServer:
    """Serves one replica of a deployment.

    Sequences can be submitted at once: they wait until there are stages.

    Args:
        assignment: a `ServingAssignment` as JSON.
    """

    def __init__(self, assignment: str) -> None:
        refuse_pickles()
        close_stalled_connections()
        self._assignment = ServingAssignment.model_validate_json(assignment)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = threading.Event()
        spec, window = self._assignment.spec, self._assignment.window_tokens
        embeds = self._assignment.pooling is not None
        limits = limits_before(spec, window, embeds=embeds)
        self._service = SchedulerService(limits, lambda: self._inbox.put(None))
        self._status = StatusRecorder(self._service, window, embeds=embeds)

    @ray.method(concurrency_group="run")
    def run(self) -> None:
        """Serve until `stop` is called or an error ends the replica; the status then has the reason."""
        failure: ShareComputeError | None = None
        try:
            from share_compute_actors.inference.beginning import begin  # noqa: PLC0415 - the control plane does not need it

            begin(self._assignment, self._service, self._status, self._inbox, self._stopped).run()
        except Cancelled:
            pass  # `stop` was called
        except Exception as ended:  # noqa: BLE001 - the status reports it
            _log.exception("deployment %s ended", self._assignment.spec.name)
            failure = as_ours(ended)
        if failure is None:
            failure = Unavailable(f"{self._assignment.spec.name} was taken down", hint="choose another model")
            self._status.set_state(DeploymentState.stopped, "taken down")
        else:
            self._status.set_state(DeploymentState.failed, failure.message, failure)
        self._service.close(failure)

    @ray.method(concurrency_group="requests")
    @answers_by(NOTHING, as_ours)
    def submit(self, generations: str) -> None:
        """Accept sequences, either all or none of them; `pull` returns their events.

        Args:
            generations: a list of `Generation` as JSON.

        Raises:
            TooLong: a prompt leaves no space in the window for an answer, or a text to embed is too long.
            Busy: too many sequences are already waiting.
            UserError: the sequences cannot be served as they are.
            ShareComputeError: the replica accepts no sequences now, for example because machines are lacking.
        """
        self._service.submit(generations_adapter.validate_json(generations))

    @ray.method(concurrency_group="requests")
    def cancel(self, sequences: Sequence[int]) -> None:
        """End sequences that are no longer wanted."""
        self._service.cancel(sequences)

    @ray.method(concurrency_group="pull")
    def pull(self, after: int, timeout_s: float) -> str:
        """Return all events after the first ``after`` ones, encoded by `write_events`.

        If there are none, wait for events up to ``timeout_s`` seconds. Only one caller may use this method; ``after``
        is the number of events that this caller has received.
        """
        return write_events(self._service.pull(after, timeout_s))

    @ray.method(concurrency_group="mail")
    def receive(self, worker: str, key: bytes, messages: list[bytes]) -> None:
        """Queue messages that claim to come from a member; `ReplicaRunner` checks the sender and decodes them."""
        self._inbox.put((worker, key, messages))

    @ray.method(concurrency_group="control")
    def offer(self, topology: str) -> None:
        """Replace the set of machines that the replica may use; ``topology`` is JSON."""
        self._inbox.put(topologies.validate_json(topology))

    @ray.method(concurrency_group="control")
    def choose_computation(self, computation: str) -> None:
        """Compute with compiled or eager code, as the stored choice says; ``computation`` is JSON."""
        self._inbox.put(Computation.model_validate_json(computation))

    @ray.method(concurrency_group="control")
    def set_standby(self, is_on: bool) -> None:
        """Make members free their shards but keep their processes; if not ``is_on``, make them load and serve again."""
        self._inbox.put(is_on)

    @ray.method(concurrency_group="control")
    def status(self) -> str:
        """Return a `ServingStatus` as JSON."""
        return self._status.read().model_dump_json()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Make `run` end all members and return; do not wait for that."""
        self._stopped.set()
