"""Draws the trials of a sweep. A trial depends only on the sweep's specification and the trial's number."""

from __future__ import annotations

import math
import random
from typing import Any

from share_compute.errors import UserError
from share_compute.specification.job import TrainJob
from share_compute.specification.kinds.parsing import parse_job
from share_compute.specification.kinds.sweep import DrawnFieldSpec, GridSearchSpec, SweepJob

_DIGITS = 4
"""Number of significant digits of drawn real numbers."""
_MOST_DIGITS = 9
"""Maximum number of digits of a place in a list."""


def settings_of(sweep: SweepJob, number: int) -> dict[str, Any]:
    """Return {name of the field: value} of a trial.

    Args:
        sweep: the sweep.
        number: number of the trial, from 1.
    """
    if not isinstance(sweep.search, GridSearchSpec):
        # Each field has its own generator, so that a new field does not change the values of the others.
        seeds = {name: f"{sweep.search.seed}/{number}/{name}" for name in sweep.fields}
        return {name: _drawn(field, random.Random(seeds[name])) for name, field in sweep.fields.items()}  # noqa: S311
    place, settings = number - 1, {}
    for name, field in reversed(sweep.fields.items()):  # the last field changes first
        place, index = divmod(place, field.count or 1)
        settings[name] = field.integers[0] + index if field.integers else (field.values or ())[index]
    return {name: settings[name] for name in sweep.fields}


def _drawn(field: DrawnFieldSpec, source: random.Random) -> Any:
    if field.values is not None:
        return field.values[source.randrange(len(field.values))]
    if field.integers is not None:
        return source.randint(*field.integers)
    if field.uniform is not None:
        low, high = field.uniform
        drawn = source.uniform(low, high)
    else:
        low, high = field.log_uniform or (1.0, 1.0)
        drawn = math.exp(source.uniform(math.log(low), math.log(high)))
    return min(high, max(low, float(f"{drawn:.{_DIGITS}g}")))


def trial_job(sweep: SweepJob, number: int, group: str | None = None) -> TrainJob:
    """Return the job of a trial.

    Args:
        sweep: the sweep.
        number: number of the trial, from 1.
        group: group of the job, if the sweep has none.

    Raises:
        UserError: a field does not exist, or the values do not fit the job; the error names the trial and its values.
    """
    settings = settings_of(sweep, number)
    document = sweep.job.model_dump(mode="json")
    for name, value in settings.items():
        _put(document, name, value)
    document |= {"name": f"{sweep.name} {number}", "tags": list(sweep.tags), "group": sweep.group or group}
    try:
        job = parse_job(document)
        sweep.require_comparable(job)
    except UserError as failure:
        fields = failure.details.get("fields") or [{"field": "", "problem": failure.message}]
        raise _invalid(number, settings, "; ".join(map(_said, fields))) from failure
    except ValueError as failure:
        raise _invalid(number, settings, str(failure)) from failure
    return job


def _invalid(number: int, settings: dict[str, Any], problems: str) -> UserError:
    values = ", ".join(f"{name} = {value}" for name, value in settings.items())
    return _refused(
        f"trial {number} ({values}) would be no valid job: {problems}",
        "correct the name of the field, or its values",
    )


def _refused(problem: str, hint: str) -> UserError:
    return UserError(
        f"fields: {problem}", hint=hint, details={"fields": [{"field": "fields", "problem": problem}]}
    )


def _said(one: dict[str, str]) -> str:
    return f"{one['field']}: {one['problem']}" if one["field"] else one["problem"]


def _put(document: dict[str, Any], name: str, value: Any) -> None:
    """Set a field in a job file by its dotted name; numbers in the name are list indices from 0."""
    *outer, last = name.split(".")
    node: Any = document
    for place, part in enumerate(outer):
        inner = _inner(node, part)
        if inner is None and isinstance(node, dict):
            inner = node[part] = {}
        if not isinstance(inner, dict | list):
            raise _no_field(name, ".".join(outer[: place + 1]))
        node = inner
    if isinstance(node, dict):
        node[last] = value
    elif _inner(node, last) is not None:
        node[int(last)] = value
    else:
        raise _no_field(name, ".".join(outer))


def _inner(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        return node.get(part)
    # A longer number cannot be a list index, and Python refuses to parse numbers of thousands of digits.
    is_place = part.isdecimal() and len(part) <= _MOST_DIGITS and int(part) < len(node)
    return node[int(part)] if is_place else None


def _no_field(name: str, outer: str) -> UserError:
    problem = f"the job has no field {name}: {outer} has no parts of this name"
    return _refused(problem, "`share-compute schema` lists the fields of a job")
