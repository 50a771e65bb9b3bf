"""The tree of errors: guarantees for callers, clients and scripts."""

from __future__ import annotations

import copy
import errno
import pickle
from collections.abc import Iterator

import pytest

from share_compute import errors
from share_compute.errors import (
    Conflict,
    ContributorLost,
    NotAuthorized,
    NotFound,
    PlanInfeasible,
    ShareComputeError,
    Unavailable,
    UserError,
    first_line,
    is_lack_of_memory,
)
from share_compute.files.field_errors import Problems


def family(root: type[ShareComputeError] = ShareComputeError) -> Iterator[type[ShareComputeError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from family(child)


def test_the_docstring_draws_the_whole_tree() -> None:
    drawn = errors.__doc__ or ""
    assert all(kind.__name__ in drawn for kind in family())


def test_codes_are_distinct() -> None:
    codes = [kind.code for kind in family()]
    assert len(set(codes)) == len(codes)


def test_exit_codes_tell_apart_what_a_script_does_next() -> None:
    main = [UserError, NotFound, Conflict, NotAuthorized, PlanInfeasible, ContributorLost, Unavailable]
    assert len({kind.exit_code for kind in main}) == len(main)
    # Exit codes from 10 on describe how a job ended.
    assert all(1 <= kind.exit_code < 10 for kind in family())


@pytest.mark.parametrize("kind", list(family()))
def test_every_field_crosses_a_process(kind: type[ShareComputeError]) -> None:
    error = kind("it broke", hint="fix it", job="job-1", step=0, machine="oak", details={"missing_bytes": 7})
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is kind
        assert str(twin) == "it broke"
        assert twin.facts() == error.facts()
        assert twin.facts() == {
            "hint": "fix it",
            "job": "job-1",
            "step": 0,
            "machine": "oak",
            "details": {"missing_bytes": 7},
        }


def test_facts_leave_out_what_is_not_known() -> None:
    assert NotFound("no such job").facts() == {}


def test_retryable_and_fixable_errors_are_apart() -> None:
    assert not issubclass(ContributorLost, UserError)
    assert 400 <= UserError.status < 500 <= ContributorLost.status


def caused(failure: Exception, by: Exception) -> Exception:
    failure.__cause__ = by
    return failure


@pytest.mark.parametrize(
    ("failure", "is_lack"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (SystemError("error return without exception set"), True),
        (ImportError("libarrow.so: failed to map segment from shared object"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("the sizes differ"), False),
        (caused(UserError("the file cannot be read"), by=MemoryError()), True),
        (caused(UserError("the column 'out of memory' is missing"), by=ValueError("out of memory")), False),
    ],
)
def test_a_lack_of_memory_is_known_by_its_cause(failure: Exception, is_lack: bool) -> None:
    assert is_lack_of_memory(failure) is is_lack


def test_a_lack_of_memory_is_known_among_other_problems() -> None:
    problems = Problems()
    with problems.noted("data"):
        raise UserError("the column is missing")
    with problems.noted("data"):
        raise UserError("the file cannot be read") from MemoryError()
    with pytest.raises(UserError) as raised:
        problems.require_none()
    assert is_lack_of_memory(raised.value)


def test_what_a_library_says_is_cut_to_its_first_line() -> None:
    assert first_line(RuntimeError("wrong\nframe #0")) == "wrong"
    assert first_line(RuntimeError()) == "RuntimeError"
