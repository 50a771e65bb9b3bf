"""Messages between the synchronizer and branches are checked, field by field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from share_compute_actors.training.rounds.messages import BranchReport

REPORT = {"branch": 1, "start": 1, "round": 1, "folder": "/a", "samples": 16, "loss": 1.5, "seconds": 2.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("branch", -1),
        ("start", 0),
        ("round", 0),
        ("round", 1.5),
        ("samples", 0),
        ("seconds", -0.1),
        ("seconds", float("inf")),
        ("seconds", float("nan")),
        ("folder", 7),
        ("more", 1),
    ],
)
def test_a_report_that_cannot_be_names_its_field(field: str, value: Any) -> None:
    assert BranchReport.model_validate(REPORT).run == (1, 1)
    with pytest.raises(ValidationError) as caught:
        BranchReport.model_validate({**REPORT, field: value})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]
