"""Jobs whose members keep shares of the optimizer's state, and jobs that cannot have this."""

from __future__ import annotations

from typing import Any

import pytest

from share_compute.errors import UserError
from share_compute.specification import parse_job


def job(training: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    return {
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
        "data": {"dataset": "digits"},
        "training": training,
        "parallelism": {"optimizer": "sharded", **parallelism},
    }


@pytest.mark.parametrize("training", [{}, {"collective": "sharded"}, {"precision": "float16"}])
def test_possible_jobs(training: dict[str, Any]) -> None:
    assert parse_job(job(training)).parallelism.shares_optimizer
    assert not parse_job(job(training, optimizer="replicated")).parallelism.shares_optimizer


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"synchronization": {"kind": "local", "branches": 2}}, r"synchronization \{kind: allreduce\}"),
        ({"synchronization": {"kind": "parameter_server", "branches": 2}}, "branches merge whole weights"),
        ({"compression": {"name": "int8", "error_feedback": None}}, "training.compression"),
        ({"collective": "ring"}, "training.collective to auto or sharded, not ring"),
    ],
)
def test_impossible_jobs_name_the_field(training: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_job(job(training))
    assert "parallelism.optimizer sharded" in caught.value.message
