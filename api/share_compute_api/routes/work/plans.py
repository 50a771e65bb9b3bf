"""Route for dry runs: returns the plan that a job would get, with the reasons for it."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from share_compute.errors import PlanInfeasible, Unavailable
from share_compute.files.field_errors import invalid
from share_compute.files.topology_file import TopologyDocument, describe_topology
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import NOT_MEASURED, IdleMachine
from share_compute.planning.report import PlanReport
from share_compute.planning.search.partitioning import load_strategy
from share_compute.quantities import listed
from share_compute.store import ApiKeyRecord
from share_compute.topology import Topology
from share_compute_api.connection.departures import departure
from share_compute_api.control.machines.live_topology import live_topology
from share_compute_api.schemas.bodies import PlanRequest
from share_compute_api.server.auth import Submitter
from share_compute_api.server.context import Context, InContext
from share_compute_api.server.problems import documented
from share_compute_api.server.upload_names import resolved
from share_compute_api.submission.jobs import check_model

router = APIRouter(prefix="/plans", tags=["plans"])

_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {"$ref": "#/components/schemas/PlanRequest"},
            "example": {
                "job": {
                    "name": "tiny-llama",
                    "model": {"config": {"model_type": "llama", "vocab_size": 2048, "hidden_size": 128}},
                    "data": {"files": ["/srv/texts/corpus.txt"]},
                },
                "compare": True,
            },
        }
    },
}


@router.post(
    "",
    operation_id="plan",
    openapi_extra={"requestBody": _BODY},
    responses=documented(400, 413, 415, 429, 500, 503),
)
async def plan(request: Request, context: InContext, caller: Submitter) -> PlanReport:
    """Return the plan that a job would get on the ready machines or on a given topology; nothing is queued."""
    content_type, body = request.headers.get("content-type", ""), await request.body()
    wanted, left_out = await context.checks.run(
        caller.id, partial(_complete, context, caller, content_type, body)
    )
    report = await context.plans.plan(wanted, departure(request.receive, context.notifier))
    if report is None:
        raise Unavailable("the server is shutting down, or the client disconnected", hint="ask again")
    return report.with_idle(left_out)


def _complete(
    context: Context, caller: ApiKeyRecord, content_type: str, body: bytes
) -> tuple[PlanRequest, tuple[IdleMachine, ...]]:
    """Check a request without importing torch, and fill in the topology of the ready machines if none is given.

    Returns:
        The complete request, and the ready machines that the topology leaves out because their speed is unknown.
    """
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send the request as application/json")
    try:
        wanted = PlanRequest.model_validate_json(body)
    except ValidationError as failure:
        raise invalid(failure, "fix these fields") from failure
    load_strategy(wanted.strategy or wanted.job.parallelism.strategy)
    with resolved(wanted.job, context, caller, reads_data=False, fetches=False) as job:
        check_model(job, context.isolated)
    wanted = wanted.model_copy(update={"job": job})
    topology = wanted.topology
    left_out: tuple[IdleMachine, ...] = ()
    if topology is None:
        live = live_topology(context.store.contributors.list([ContributorState.ready]))
        topology = describe_topology(live)
        left_out = _unmeasured(live, topology)
    if not topology.contributors and left_out:
        names = listed([machine.name for machine in left_out])
        raise PlanInfeasible(
            f"no plan can be predicted: no ready machine ({names}) has a measured speed",
            hint="run share-compute doctor on these machines and let them join again, or give a topology",
            details={"machines_ready": len(left_out)},
        )
    if not topology.contributors:
        raise PlanInfeasible(
            "there is no machine to plan on",
            hint="let machines join (share-compute invite), or give a topology with some",
            details={"machines_ready": 0},
        )
    return wanted.model_copy(update={"topology": topology}), left_out


def _unmeasured(live: Topology, described: TopologyDocument) -> tuple[IdleMachine, ...]:
    known = {machine.id or machine.name for machine in described.contributors}
    return tuple(
        IdleMachine(contributor_id=machine.id, name=machine.name, reason=NOT_MEASURED)
        for machine in live.contributors
        if machine.id not in known
    )
