"""``share-compute plan --operators``: divides the operators of a model's layers between the devices of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from share_compute.errors import UserError

if TYPE_CHECKING:
    from share_compute.specification import TrainJob
    from share_compute.topology import Topology

SearchChoice = Literal["dynamic_programming", "recursive_programming", "sharding_propagation"]


def show_operators(
    spec: TrainJob,
    topology_file: Path | None,
    *,
    devices: int,
    search: SearchChoice | None,
    fixed: Sequence[str],
    fully_use_devices: bool,
    dot: Path | None,
    as_json: bool,
) -> None:
    """Print the plan of a job's operators, and write its graph to the file ``dot``."""
    from share_compute_api.client.job_file import write_text
    from share_compute_api.terminal.operators import dot_text, print_operators
    from share_compute_api.terminal.output import print_json
    from share_compute_api.workers.planning import operators_on_paper

    own = spec.parallelism.operators
    report = operators_on_paper(
        spec,
        _topology(topology_file),
        devices=devices,
        search=search or own.search,
        fixed=own.strategies | _strategies(fixed),
        fully_use_devices=fully_use_devices or own.fully_use_devices,
    )
    if dot is not None:
        write_text(dot, dot_text(report))
    if as_json:
        print_json(report)
    else:
        print_operators(report)


def _topology(file: Path | None) -> Topology:
    if file is None:
        from share_compute_api.client.client import Client

        with Client() as client:
            return client.topology().topology()
    from share_compute_api.client.job_file import read_topology_file

    return read_topology_file(file)


def _strategies(fixed: Sequence[str]) -> dict[str, str]:
    """Return the strategies of ``--fixed``, by pattern.

    Raises:
        UserError: a value is not of the form ``OPERATOR=STRATEGY``, or two values have the same pattern.
    """
    found: dict[str, str] = {}
    for value in fixed:
        pattern, equals, strategy = value.rpartition("=")
        if not equals or not pattern or not strategy:
            raise UserError(
                f"--fixed {value} is not of the form OPERATOR=STRATEGY", hint="for example mlp.down_proj=row"
            )
        if found.setdefault(pattern, strategy) != strategy:
            raise UserError(f"--fixed gives {pattern} two strategies", hint="leave one of them out")
    return found
