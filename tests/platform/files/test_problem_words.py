"""Problems of fields: in the words of the project, all at once, with the nearest field or value."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from share_compute.errors import UserError
from share_compute.files.field_errors import field_errors
from share_compute.specification import parse_submission

LAYERS = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]


class Colour(StrEnum):
    red = "red"
    green = "green"


class Values(BaseModel):
    whole: int = 1
    number: float = Field(default=1.0, allow_inf_nan=False)
    wait_s: float = 1.0
    size_bytes: int = 1
    only: Literal["digits"] = "digits"
    text: str = Field(default="a", min_length=1, max_length=3, pattern="^[a-z]*$")
    yes: bool = True
    many: tuple[int, ...] = Field(default=(1,), min_length=1, max_length=2)
    named: dict[str, int] = {}
    choice: Literal["float32", "float16"] = "float32"
    colour: Colour = Colour.red
    path: Path = Path()
    least: Annotated[int, Field(ge=1, le=9)] = 1
    between: Annotated[float, Field(gt=0, lt=1)] = 0.5


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("whole", "many", "must be a whole number, not 'many'"),
        ("whole", 1.5, "must be a whole number, not 1.5"),
        ("whole", [1], "must be a whole number, not a list"),
        ("whole", "\uff11\uff10\uff10", "must be a whole number, not '\uff11\uff10\uff10'; write 100"),
        ("number", "many", "must be a number, not 'many'"),
        ("number", "0,5", "must be a number, not '0,5'; write 0.5"),
        ("whole", "1,000", "must be a whole number, not '1,000'"),
        ("whole", "2,5", "must be a whole number, not '2,5'"),
        ("size_bytes", "1TB", "must be a whole number of bytes, not '1TB'; write 1000000000000"),
        ("number", "5%", "must be a number, not '5%'; write 0.05"),
        ("number", "5 minutes", "must be a number, not '5 minutes'"),
        ("wait_s", "5 minutes", "must be a number of seconds, not '5 minutes'; write 300"),
        ("size_bytes", "8 MiB", "must be a whole number of bytes, not '8 MiB'; write 8388608"),
        ("number", float("nan"), "must be a finite number"),
        ("text", 1, "must be text, not 1; put it in quotes"),
        ("text", "", "must have at least 1 character"),
        ("text", "abcd", "must have at most 3 characters"),
        ("text", "A", "must match the pattern ^[a-z]*$"),
        ("yes", "maybe", "must be true or false, not 'maybe'"),
        ("many", 1, "must be a list, not 1"),
        ("many", [], "must have at least 1 item, not 0"),
        ("many", [1, 2, 3], "must have at most 2 items, not 3"),
        ("named", None, "must be a mapping of keys to values, not nothing"),
        ("only", "digit", "must be 'digits'"),
        ("choice", "fp16", "must be 'float32' or 'float16'; did you mean 'float16'?"),
        ("choice", "flaot32", "must be 'float32' or 'float16'; did you mean 'float32'?"),
        ("choice", "int2", "must be 'float32' or 'float16'"),
        ("colour", "gren", "must be 'red' or 'green'; did you mean 'green'?"),
        ("path", 1, "must be a path"),
        ("least", 0, "must be at least 1"),
        ("least", 10, "must be at most 9"),
        ("between", 0, "must be more than 0"),
        ("between", 1, "must be less than 1"),
    ],
)
def test_problems_are_in_the_words_of_the_project(field: str, value: Any, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Values.model_validate({field: value})
    assert field_errors(caught.value) == [{"field": field, "problem": problem}]


def refused(**parts: Any) -> dict[str, str]:
    job = {"model": {"layers": LAYERS}, "data": {"dataset": "digits"}, **parts}
    with pytest.raises(UserError) as caught:
        parse_submission(job)
    return {one["field"]: one["problem"] for one in caught.value.details["fields"]}


@pytest.mark.parametrize(
    ("parts", "field", "nearest"),
    [
        ({"training": {"learning_rate": 0.1}}, "training.learning_rate", "training.optimizer.learning_rate"),
        ({"learning_rate": 0.1}, "learning_rate", "training.optimizer.learning_rate"),
        ({"batch_size": 4}, "batch_size", "training.batch_size"),
        ({"strategy": "uniform"}, "strategy", "parallelism.strategy"),
    ],
)
def test_a_key_in_the_wrong_place_is_found_at_any_depth(
    parts: dict[str, Any], field: str, nearest: str
) -> None:
    key = field.rpartition(".")[2]
    assert refused(**parts) == {field: f"unknown key {key!r}; did you mean {nearest!r}?"}


def test_all_problems_are_reported_at_once() -> None:
    problems = refused(
        training={"steps": "many", "precision": "fp16", "learning_rate": 1, "batchsize": 2}, epochs=3
    )
    assert set(problems) == {
        "training.steps", "training.precision", "training.learning_rate", "training.batchsize", "epochs",
    }  # fmt: skip
    assert problems["training.steps"] == "must be a whole number, not 'many'"
    assert problems["training.precision"].endswith("did you mean 'float16'?")
    assert problems["training.batchsize"].endswith("did you mean 'batch_size'?")
