"""Plans on paper, in this process: the model is counted on torch's meta device, then laid over a topology.

``python -m share_compute_api.planning plan BYTES`` reads a `PlanRequest` as JSON from standard input and writes
``{"report": ...}`` or ``{"problem": ...}``; with ``timeline`` in place of ``plan`` it reads a `TimelineRequest`. The
control plane never imports torch: it asks a process of its own, which takes no more than so much memory and lets others
go first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.planning.plan import Plan
from share_compute.planning.timings import MachineTimings
from share_compute.planning.words import bytes_text
from share_compute.planning.workload import ServingWorkload
from share_compute.specification import TrainJob
from share_compute.strict import StrictModel
from share_compute.topology import Topology

if TYPE_CHECKING:
    from share_compute.planning.profile import ModelProfile
    from share_compute.planning.report import PlanReport, PlanTimeline

_NICENESS = 10


class TimelineRequest(StrictModel):
    """Which plan is to be laid out, and what is known of its machines."""

    job: TrainJob
    plan: Plan
    topology: Topology
    timings: dict[str, MachineTimings]
    """By contributor id."""


def plan_on_paper(
    spec: TrainJob,
    topology: Topology,
    *,
    strategy: str | None = None,
    compare: bool = False,
    serving: ServingWorkload | None = None,
) -> PlanReport:
    """Return the plan that a job would get on these machines, and why. Imports torch.

    Args:
        spec: the job; its data is not looked at, and paths must lie on this machine.
        topology: the machines.
        strategy: in place of the job's own.
        compare: tell what every other strategy would have made of it.
        serving: tell, too, what the machines would do for requests.

    Raises:
        PlanInfeasible: the machines cannot hold it; ``details`` says what is missing.
        UserError: the model or the strategy does not exist.
    """
    from share_compute.planning.report import dry_run

    return dry_run(spec, topology, _profile(spec), strategy=strategy, compare=compare, serving=serving)


def _profile(spec: TrainJob) -> ModelProfile:
    from share_compute.data.tokenization import expected_vocab_size
    from share_compute.models.blueprint import blueprint_of, dissect

    return dissect(blueprint_of(spec, expected_vocab_size(spec)))


def _lay_out(request: TimelineRequest) -> PlanTimeline:
    from share_compute.planning.report import lay_out

    return lay_out(request.job, request.plan, request.topology, _profile(request.job), request.timings)


def _plan(text: str) -> PlanReport:
    from share_compute_api.schemas import PlanRequest

    request = PlanRequest.model_validate_json(text)
    assert request.topology is not None
    return plan_on_paper(
        request.job,
        request.topology.topology(),
        strategy=request.strategy,
        compare=request.compare,
        serving=request.serving.workload() if request.serving is not None else None,
    )


def _give_way(memory_bytes: int) -> None:
    """Keep this process from disturbing the server and the jobs on its machine."""
    import resource

    # Not the address space: libraries that are only mapped would count, many GiB of them where torch brings CUDA.
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    os.nice(_NICENESS)


def main() -> None:
    """Answer one request."""
    wanted, memory_bytes = sys.argv[1], int(sys.argv[2])
    _give_way(memory_bytes)
    # Libraries print what they like; the answer must stay alone on its pipe.
    answer, sys.stdout = sys.stdout, sys.stderr
    text = sys.stdin.read()
    try:
        report = _plan(text) if wanted == "plan" else _lay_out(TimelineRequest.model_validate_json(text))
    except ShareComputeError as failure:
        _refuse(failure, answer)
    except (MemoryError, OSError, RuntimeError, ImportError, SystemError) as failure:
        if not _is_out_of_memory(failure):
            raise
        needed = (
            f"planning this takes more than the {bytes_text(memory_bytes)} of memory that the server gives it"
        )
        alone = "plan on your own: share-compute plan --topology FILE"
        _refuse(Unavailable(needed, mend=f"ask for fewer machines or layers, or {alone}"), answer)
    else:
        json.dump({"report": report.model_dump(mode="json")}, answer)


def _is_out_of_memory(failure: BaseException | None) -> bool:
    """Return whether that is behind it: Python, the system, torch and mute C code say it their own ways."""
    while failure is not None:
        if isinstance(failure, MemoryError | SystemError) or "allocate memory" in str(failure):
            return True
        failure = failure.__cause__ or failure.__context__
    return False


def _refuse(failure: ShareComputeError, answer: TextIO) -> None:
    problem = {"code": failure.code, "detail": failure.message, **failure.facts()}
    json.dump({"problem": problem}, answer, default=str)


if __name__ == "__main__":
    main()
