"""Labels of machines, such as ``site=paris``: claims of the machines' owners, which the server does not verify.

Also selectors of machines.

A selector is the name or the id of a machine, or ``KEY=VALUE`` for all machines with this label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Protocol, TypeAlias

from pydantic import AfterValidator, Field

from share_compute.errors import UserError

MOST_LABELS = 16
"""Maximum number of labels of one machine."""
_KEY = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_MOST_LETTERS = 64
_ID = re.compile(r"con-[a-z2-7]{8}")
"""Ids that the server gives. A selector of this form is no name, because any machine can join with any name."""


class Labelled(Protocol):
    """A machine that selectors may match."""

    @property
    def id(self) -> str:
        """Id of the machine."""

    @property
    def name(self) -> str:
        """Name of the machine."""

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the machine."""

    @property
    def most_ranks(self) -> int:
        """Largest number of processes that can compute the layers of a member on the machine together."""


def _checked(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        check_label(key, value)
    return labels


def check_label(key: str, value: str) -> None:
    """Raise ValueError if the key or the value is not allowed; the message names it and the reason."""
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"{key[:40]!r} is no key of a label: keys have up to 32 characters of a-z, 0-9, _ and -, and begin with a-z"
        )
    if not 0 < len(value) <= _MOST_LETTERS or not value.isprintable():
        raise ValueError(f"the value of label {key} must have 1 to {_MOST_LETTERS} printable characters")


Labels: TypeAlias = Annotated[dict[str, str], Field(max_length=MOST_LABELS), AfterValidator(_checked)]


def parse_labels(given: Iterable[str]) -> dict[str, str]:
    """Return the labels that are given as ``KEY=VALUE``.

    Raises:
        UserError: a text has no ``=``, a key or a value is not allowed, a key is given twice, or there are too many.
    """
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"{text[:40]!r} is no label", hint="give KEY=VALUE, e.g. --label site=paris")
        try:
            check_label(key, value)
        except ValueError as problem:
            raise UserError(str(problem), hint="give KEY=VALUE, e.g. --label site=paris") from problem
        if key in found:
            raise UserError(f"label {key} is given twice", hint="give each key once")
        found[key] = value
    if len(found) > MOST_LABELS:
        raise UserError(
            f"{len(found)} labels are given, and a machine has at most {MOST_LABELS}",
            hint="give fewer labels",
        )
    return found


def matches(selector: str, machine: Labelled) -> bool:
    """Return whether a selector is the name or the id of a machine, or one of its labels."""
    if selector == machine.id or (selector == machine.name and not _ID.fullmatch(selector)):
        return True
    key, equals, value = selector.partition("=")
    return bool(equals) and machine.labels.get(key) == value


def label_texts(labels: Mapping[str, str]) -> list[str]:
    """Return the labels as ``KEY=VALUE``, sorted by key."""
    return [f"{key}={value}" for key, value in sorted(labels.items())]
