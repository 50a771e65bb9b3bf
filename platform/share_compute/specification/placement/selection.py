"""The machines that a job or a deployment may use: the fields ``parallelism.only`` and ``parallelism.avoid``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from share_compute.labels import Labelled, check_label, matches
from share_compute.quantities import listed
from share_compute.specification.base import SpecModel

_MOST_SELECTORS = 100
_MOST_NAMED = 4
"""Number of names, and of labels, that a reason lists."""


def _checked(selectors: tuple[str, ...]) -> tuple[str, ...]:
    for place, selector in enumerate(selectors):
        if not selector.isprintable():
            raise ValueError("names and labels have printable characters only")
        key, equals, value = selector.partition("=")
        if equals:
            check_label(key, value)
        if selector in selectors[:place]:
            raise ValueError(f"{selector!r} is given twice")
    return selectors


_Selectors: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
    Field(max_length=_MOST_SELECTORS, fail_fast=True),
    AfterValidator(_checked),
]


class SelectionSpec(SpecModel):
    """The machines that a job or a deployment may use."""

    only: _Selectors = Field(default=(), title="Only these machines")
    """Names, ids or labels (`site=paris`) of machines: the others are never used. Empty allows all machines."""
    avoid: _Selectors = Field(default=(), title="Avoid these machines")
    """Names, ids or labels (`gpu=no`) of machines that are never used."""

    @model_validator(mode="after")
    def _nothing_is_wanted_and_avoided(self) -> Self:
        both = [selector for selector in self.only if selector in self.avoid]
        if both:
            raise ValueError(f"only and avoid both name {both[0]!r}: leave it out of one of them")
        return self

    @property
    def ranks(self) -> int:
        """Number of processes on each machine that compute each layer together."""
        return 1

    def allows(self, machine: Labelled) -> bool:
        """Return whether the machine may be used."""
        return self.why_not(machine) is None

    def why_not(self, machine: Labelled) -> str | None:
        """Return why the machine is not used, in words; None if it may be used."""
        small = self._why_too_small(machine)
        if small is not None:
            return small
        avoided = next((each for each in self.avoid if matches(each, machine)), None)
        if avoided is not None:
            return f"avoided by the job: parallelism.avoid names {avoided}"
        if self.only and not any(matches(each, machine) for each in self.only):
            return f"avoided by the job: parallelism.only names {listed(self.only)}"
        return None

    def _why_too_small(self, machine: Labelled) -> str | None:
        """Return why the machine cannot run all ranks, in words; None if it can."""
        if self.ranks <= machine.most_ranks:
            return None
        return f"too small: it can run {machine.most_ranks} of the {self.ranks} ranks of parallelism.tensor"

    @property
    def words(self) -> str:
        """Text about the machines that may be used, such as ``a machine with gpu=yes``; empty if all may be used."""
        if self.ranks > 1:
            return self._with_ranks(self._selected or "a machine")
        return self._selected

    def _with_ranks(self, machine: str) -> str:
        """Return a phrase for a machine that can run all ranks."""
        return f"{machine} that computes with {self.ranks} CPU threads or more, or with {self.ranks} GPUs together"

    @property
    def _selected(self) -> str:
        """Text about the machines that ``only`` and ``avoid`` allow; empty if all are allowed."""
        if not self.only and not self.avoid:
            return ""
        names, labels = _sorted_out(self.only)
        allowed = " or ".join(
            [*_few(names), *([f"a machine with {' or '.join(_few(labels))}"] if labels else [])]
        )
        names, labels = _sorted_out(self.avoid)
        avoided = [f"without {' or '.join(_few(labels))}"] if labels else []
        avoided += [f"other than {' or '.join(_few(names))}"] if names else []
        return " ".join(filter(None, (allowed or "a machine", " and ".join(avoided))))

    def disagreement(self, machines: Iterable[Labelled]) -> str | None:
        """Return the name of a machine that ``only`` and ``avoid`` both select, by name or id; None if none."""
        wanted, avoided = set(_sorted_out(self.only)[0]), set(_sorted_out(self.avoid)[0])
        return next(
            (one.name for one in machines if wanted & {one.id, one.name} and avoided & {one.id, one.name}),
            None,
        )


def _few(selectors: list[str]) -> list[str]:
    """Return the first selectors, and the number of the others."""
    rest = len(selectors) - _MOST_NAMED
    return selectors if rest <= 0 else [*selectors[:_MOST_NAMED], f"one of {rest} more"]


def _sorted_out(selectors: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split selectors into names and ids, and labels."""
    selectors = list(selectors)
    return [each for each in selectors if "=" not in each], [each for each in selectors if "=" in each]
