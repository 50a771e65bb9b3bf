"""Starts a replica: opens the weights, profiles the model, and creates the objects that serve it."""

from __future__ import annotations

import queue
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute_actors.group.answering import ask_shard_store
from share_compute_actors.group.exceptions import Cancelled
from share_compute_actors.inference.assembly import Assembly
from share_compute_actors.inference.assignment import ServingAssignment
from share_compute_actors.inference.computation import ComputationChooser
from share_compute_actors.inference.deployment import InboxItem, ReplicaRunner
from share_compute_actors.inference.planner import Planner
from share_compute_actors.inference.scheduler_service import SchedulerService
from share_compute_actors.inference.served_model import SERVED, ServedModel, known_model
from share_compute_actors.inference.serving_group import ServingGroup
from share_compute_actors.inference.status_recorder import StatusRecorder
from share_compute_actors.inference.weights import ServedWeights

_POLL_S = 0.2


def begin(
    assignment: ServingAssignment,
    service: SchedulerService,
    status: StatusRecorder,
    inbox: queue.SimpleQueue[InboxItem],
    stopped: threading.Event,
) -> ReplicaRunner:
    """Start the `ServedWeights` actor, profile the model, and return the replica's main loop for the caller to run.

    Members that an earlier server of the replica left are taken over.

    Call this function in the server's actor.

    Args:
        assignment: the deployment, and the machines that it may use.
        service: the scheduler service with the sequences.
        status: status of the deployment.
        inbox: queue of messages from members and the control plane.
        stopped: event that is set when the replica is stopped.

    Raises:
        Cancelled: the replica was stopped meanwhile.
        UserError: the folder has no model, or one that cannot be served.
    """
    embeds = assignment.pooling is not None
    me = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(me.get_node_id(), soft=False)
    weights = ServedWeights.options(  # type: ignore[attr-defined]
        scheduling_strategy=here, max_restarts=-1, max_task_retries=-1
    ).remote(assignment.folder, assignment.spec.dtype, embeds=embeds)
    model = known_model(assignment.folder, assignment.spec.dtype, embeds=embeds) or _prepared(
        weights, stopped
    )
    group = ServingGroup(assignment, model, weights, me.current_actor, stopped)
    planner = Planner(assignment.spec, model.profile, assignment.window_tokens, embeds=embeds)
    chooser = ComputationChooser(assignment.spec, assignment.computation, group)
    assembly = Assembly(planner, group, service, status, chooser)
    assembly.attach()
    if assignment.is_standby:
        assembly.stand_by()
    return ReplicaRunner(assembly, service, status, inbox, stopped)


def _prepared(weights: Any, stopped: threading.Event) -> ServedModel:
    ref = weights.prepare.remote()
    while not ray.wait([ref], timeout=_POLL_S)[0]:
        if stopped.is_set():
            raise Cancelled
    return ask_shard_store(SERVED, ref)
