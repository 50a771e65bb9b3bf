"""Models of external data: frozen, with helpful errors for unknown keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from share_compute.files.strict import StrictModel, nearest


class Sample(StrictModel):
    batch_size: int = 1
    steps: int = Field(default=2, alias="numSteps")


class Outer(StrictModel):
    inner: Sample


def problem(data: dict[str, object]) -> str:
    with pytest.raises(ValidationError) as caught:
        Sample.model_validate(data)
    return str(caught.value.errors()[0]["msg"])


def test_an_unknown_key_names_the_nearest() -> None:
    assert "unknown key 'batchsize'; did you mean 'batch_size'?" in problem({"batchsize": 3})


def test_an_unlike_key_names_all() -> None:
    assert "unknown key 'zzz'; known keys: batch_size, numSteps" in problem({"zzz": 3})


def test_several_unknown_keys_are_all_named() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"inner": {"batchsize": 3, "numStep": 4, "batch_size": "x"}, "iner": {}})
    assert {(error["loc"], error["msg"].partition(";")[0]) for error in caught.value.errors()} == {
        (("inner", "batch_size"), "Input should be a valid integer, unable to parse string as an integer"),
        (("inner", "batchsize"), "unknown key 'batchsize'"),
        (("inner", "numStep"), "unknown key 'numStep'"),
        (("iner",), "unknown key 'iner'"),
    }
    hints = {error["loc"][-1]: error["msg"].partition("; ")[2] for error in caught.value.errors()}
    assert hints["numStep"] == "did you mean 'numSteps'?"
    assert hints["iner"] == "did you mean 'inner'?"


def test_json_is_checked_likewise() -> None:
    with pytest.raises(ValidationError, match="did you mean 'batch_size'"):
        Outer.model_validate_json('{"inner": {"batchsize": 3}}')


def test_braces_in_keys_are_shown_as_they_are() -> None:
    assert "unknown key '{steps}'" in problem({"{steps}": 3})


def test_an_alias_is_what_is_known() -> None:
    assert Sample.model_validate({"numSteps": 5}).steps == 5


def test_models_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Sample().batch_size = 3  # type: ignore[misc]


@given(st.dictionaries(st.one_of(st.text(), st.integers()), st.integers(), min_size=1))
def test_no_unknown_key_gets_through(data: dict[object, int]) -> None:
    if set(data) <= {"batch_size", "numSteps"}:
        return
    with pytest.raises(ValidationError):
        Sample.model_validate(data)


@given(st.text(), st.lists(st.text(), max_size=5))
def test_nearest_is_one_of_the_known_or_none(name: str, known: list[str]) -> None:
    assert nearest(name, known) in {None, *known}
