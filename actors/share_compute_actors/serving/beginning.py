"""Begins to serve: opens the weights, counts what the model costs, and puts together who does the work."""

from __future__ import annotations

import queue
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute_actors.coordinator.coordinator import Cancelled
from share_compute_actors.member.rows import ask_library
from share_compute_actors.serving.assembly import Assembly
from share_compute_actors.serving.assignment import ServingAssignment
from share_compute_actors.serving.crew import ServingCrew
from share_compute_actors.serving.deployment import Deployment, Heard
from share_compute_actors.serving.desk import Desk
from share_compute_actors.serving.planner import Planner
from share_compute_actors.serving.standing import Standing
from share_compute_actors.serving.weights import SERVED, ServedModel, ServedWeights

_GLANCE_S = 0.2


def begin(
    assignment: ServingAssignment,
    desk: Desk,
    standing: Standing,
    inbox: queue.SimpleQueue[Heard],
    stopped: threading.Event,
) -> Deployment:
    """Return what serves a replica, from the actor that is to serve it.

    Args:
        assignment: what is served where.
        desk: where sequences are.
        standing: what is told of the deployment.
        inbox: what members and the control plane say.
        stopped: set when all is to end.

    Raises:
        Cancelled: it was stopped meanwhile.
        UserError: there is no model in the folder, or none that can be served.
    """
    embeds = assignment.pooling is not None
    me = ray.get_runtime_context()
    here = NodeAffinitySchedulingStrategy(me.get_node_id(), soft=False)
    weights = ServedWeights.options(  # type: ignore[attr-defined]
        scheduling_strategy=here, max_restarts=-1, max_task_retries=-1
    ).remote(assignment.folder, assignment.spec.dtype, embeds=embeds)
    model = _prepared(weights, stopped)
    crew = ServingCrew(assignment, model, weights, me.current_actor, stopped)
    planner = Planner(assignment.spec, model.profile, assignment.window_tokens, embeds=embeds)
    return Deployment(Assembly(planner, crew, desk, standing), desk, standing, inbox, stopped)


def _prepared(weights: Any, stopped: threading.Event) -> ServedModel:
    asked = weights.prepare.remote()
    while not ray.wait([asked], timeout=_GLANCE_S)[0]:
        if stopped.is_set():
            raise Cancelled
    return ask_library(SERVED, asked)
