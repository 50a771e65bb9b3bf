"""Plans on paper, in this process: the model is counted on torch's meta device, then laid over a topology.

``python -m share_compute_api.planning BYTES`` reads a `PlanRequest` as JSON from standard input and writes
``{"report": ...}`` or ``{"problem": ...}``: the control plane never imports torch, it asks a process of its own, which
takes no more than so much memory and lets others go first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, TextIO

from share_compute.errors import ShareComputeError, Unavailable
from share_compute.planning.words import bytes_text
from share_compute.planning.workload import ServingWorkload
from share_compute.specification import TrainJob
from share_compute.topology import Topology

if TYPE_CHECKING:
    from share_compute.planning.report import PlanReport

_NICENESS = 10


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
    from share_compute.data.tokenization import expected_vocab_size
    from share_compute.models.blueprint import blueprint_of, dissect
    from share_compute.planning.report import dry_run

    profile = dissect(blueprint_of(spec, expected_vocab_size(spec)))
    return dry_run(spec, topology, profile, strategy=strategy, compare=compare, serving=serving)


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
    from share_compute_api.schemas import PlanRequest

    memory_bytes = int(sys.argv[1])
    _give_way(memory_bytes)
    # Libraries print what they like; the answer must stay alone on its pipe.
    answer, sys.stdout = sys.stdout, sys.stderr
    request = PlanRequest.model_validate_json(sys.stdin.read())
    assert request.topology is not None
    try:
        report = plan_on_paper(
            request.job,
            request.topology.topology(),
            strategy=request.strategy,
            compare=request.compare,
            serving=request.serving.workload() if request.serving is not None else None,
        )
    except ShareComputeError as failure:
        _refuse(failure, answer)
    except (MemoryError, OSError, RuntimeError) as failure:
        # Python, the system and torch each say it their own way.
        if not isinstance(failure, MemoryError) and "allocate memory" not in str(failure):
            raise
        needed = (
            f"planning this takes more than the {bytes_text(memory_bytes)} of memory that the server gives it"
        )
        alone = "plan on your own: share-compute plan --topology FILE"
        _refuse(Unavailable(needed, mend=f"ask for fewer machines or layers, or {alone}"), answer)
    else:
        json.dump({"report": report.model_dump(mode="json")}, answer)


def _refuse(failure: ShareComputeError, answer: TextIO) -> None:
    problem = {"code": failure.code, "detail": failure.message, **failure.facts()}
    json.dump({"problem": problem}, answer, default=str)


if __name__ == "__main__":
    main()
