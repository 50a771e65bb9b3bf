"""Plans a job without running it: profiles the model on torch's meta device, then places the model on a topology.

``python -m share_compute_api.workers.planning plan BYTES`` reads a `PlanRequest` as JSON from standard input and writes
``{"report": ...}`` or ``{"problem": ...}``. With ``timeline`` instead of ``plan`` it reads a `TimelineRequest`. The
process limits its memory to BYTES and lowers its priority. Planning has its own process, because the control plane must
not import torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from share_compute.errors import ShareComputeError, Unavailable, is_lack_of_memory
from share_compute.files.strict import StrictModel
from share_compute.planning.cost.timings import MachineTimings
from share_compute.planning.plan import Plan
from share_compute.quantities import bytes_text
from share_compute.specification import TrainJob
from share_compute.specification.workload import ServingWorkload
from share_compute.topology import Topology

if TYPE_CHECKING:
    from share_compute.models.blueprint import Blueprint
    from share_compute.planning.operators.plan import OperatorReport
    from share_compute.planning.report import PlanReport, PlanTimeline
    from share_compute.specification.placement.operators import SearchName

_NICENESS = 10


class TimelineRequest(StrictModel):
    """Request for the timeline of one step of a plan."""

    job: TrainJob
    plan: Plan
    topology: Topology
    timings: dict[str, MachineTimings]
    """Measured timings of the machines, by contributor id."""


def plan_on_paper(
    spec: TrainJob,
    topology: Topology,
    *,
    strategy: str | None = None,
    compare: bool = False,
    serving: ServingWorkload | None = None,
) -> PlanReport:
    """Plan a job for given machines without a server; return the plan with its reasons. This function imports torch.

    Args:
        spec: the job; its data is not read, and its paths must be on this machine.
        topology: the machines.
        strategy: strategy that replaces the job's own; None keeps the job's own strategy.
        compare: whether the report also lists the outcome of every strategy.
        serving: expected requests; if given, the report also predicts how the machines serve them.

    Raises:
        PlanInfeasible: without ``serving``, the machines cannot train the model; with ``serving``, they cannot serve
            these requests. If known, ``details`` says what is missing.
        UserError: the model does not exist or has nothing to train, or the strategy does not exist.
    """
    from share_compute.models.factory import dissect
    from share_compute.planning.dry_run import dry_run

    blueprint = _blueprint(spec)
    if (
        spec.model.layers is not None and spec.data.table is None
    ):  # a table is read before its columns are known
        from share_compute.models.layers import require_fit

        require_fit(blueprint, checks_outputs=False)
    if serving is not None and serving.ranks > 1:
        from share_compute.inference.runtime.tensor_parallel import require_divisible

        require_divisible(blueprint.config or {}, serving.ranks)
    elif spec.parallelism.needs_a_check:
        from share_compute.sharding.layer_plans import require_parallelism

        require_parallelism(blueprint, spec)
    return dry_run(spec, topology, dissect(blueprint), strategy=strategy, compare=compare, serving=serving)


def operators_on_paper(
    spec: TrainJob,
    topology: Topology,
    *,
    devices: int,
    search: SearchName,
    fixed: Mapping[str, str],
    fully_use_devices: bool,
) -> OperatorReport:
    """Plan the operators of a job's layers on the devices of one machine. This function imports torch.

    Args:
        spec: the job; its data is not read, and its paths must be on this machine.
        topology: the machines.
        devices: number of devices.
        search: name of the search.
        fixed: strategies by pattern of operators' names.
        fully_use_devices: whether every operator that can be cut is cut, so that no device computes it as a whole.

    Raises:
        PlanInfeasible: no machine has this many devices.
        UserError: the model does not exist, its layers have no fixed operators, or a given strategy is not legal.
    """
    from share_compute.planning.operators.cost import Workload
    from share_compute.planning.operators.plan import OperatorReport, group_on, plan_layer, require_matches
    from share_compute.planning.operators.trace import layer_graphs

    training = spec.training
    machine, group, link_assumed = group_on(topology, devices, training.precision)
    microbatches = training.microbatches or 1
    samples = training.batch_size // microbatches
    length = training.sequence_length
    found = layer_graphs(_blueprint(spec), samples, length)
    require_matches([graph for graph, _ in found], fixed)
    layers = tuple(
        plan_layer(
            graph,
            group,
            layers=places,
            workload=Workload(microbatches),
            search=search,
            fixed=fixed,
            fully_use_devices=fully_use_devices,
        )
        for graph, places in found
    )
    return OperatorReport(
        model=spec.name,
        machine=machine,
        devices=devices,
        search=search,
        fully_use_devices=fully_use_devices,
        samples=samples,
        microbatches=microbatches,
        link_bytes_per_s=group.link_bytes_per_s,
        link_latency_s=group.link_latency_s,
        link_assumed=link_assumed,
        layers=layers,
    )


def _blueprint(spec: TrainJob) -> Blueprint:
    from share_compute.data.tokenization import expected_vocab_size
    from share_compute.models.blueprint import blueprint_of

    return blueprint_of(spec, expected_vocab_size(spec))


def _lay_out(request: TimelineRequest) -> PlanTimeline:
    from share_compute.models.factory import dissect
    from share_compute.planning.dry_run import lay_out

    profile = dissect(_blueprint(request.job))
    return lay_out(request.job, request.plan, request.topology, profile, request.timings)


def _plan(text: str) -> PlanReport:
    from share_compute_api.schemas.bodies import PlanRequest

    request = PlanRequest.model_validate_json(text)
    assert request.topology is not None
    return plan_on_paper(
        request.job,
        request.topology.topology(),
        strategy=request.strategy,
        compare=request.compare,
        serving=None if request.serving is None else request.serving.workload(request.job.parallelism.tensor),
    )


def _give_way(memory_bytes: int) -> None:
    """Limit the memory and lower the priority of this process, to protect the server and running jobs."""
    import resource

    # RLIMIT_DATA is used because RLIMIT_AS would also count mapped libraries: many GiB if torch includes CUDA.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    os.nice(_NICENESS)


def main() -> None:
    """Read one request from standard input, and write its answer."""
    wanted, memory_bytes = sys.argv[1], int(sys.argv[2])
    _give_way(memory_bytes)
    # Libraries may print to standard output, which must contain nothing but the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    text = sys.stdin.read()
    try:
        report = _plan(text) if wanted == "plan" else _lay_out(TimelineRequest.model_validate_json(text))
    except ShareComputeError as failure:
        _refuse(failure, answer)
    except (MemoryError, OSError, RuntimeError, ImportError, SystemError) as failure:
        if not is_lack_of_memory(failure):
            raise
        needed = (
            f"planning this takes more than the {bytes_text(memory_bytes)} of memory that the server gives it"
        )
        alone = "plan on your own: share-compute plan --topology FILE"
        _refuse(Unavailable(needed, hint=f"ask for fewer machines or layers, or {alone}"), answer)
    else:
        json.dump({"report": report.model_dump(mode="json")}, answer)


def _refuse(failure: ShareComputeError, answer: TextIO) -> None:
    problem = {"code": failure.code, "detail": failure.message, **failure.facts()}
    json.dump({"problem": problem}, answer, default=str)


if __name__ == "__main__":
    main()
