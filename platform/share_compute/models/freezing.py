"""Freezing: selects, by stored name, which parameters of a model are trained."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from share_compute.errors import UserError
from share_compute.files.strict import nearest
from share_compute.models.profiles.places import Places

Named: TypeAlias = tuple[str, nn.Parameter]
_LAYERS = re.compile(r"layers\[(-?\d*):(-?\d*)\]")


def frozen_names(names: Iterable[str], patterns: Sequence[str], places: Places) -> set[str]:
    """Return the names that match at least one pattern: a glob of stored names, or a range of layers ``layers[:6]``."""
    found: set[str] = set()
    known = list(names)
    for pattern in patterns:
        found.update(_matches(known, pattern, places))
    return found


def require_sense(
    names: Sequence[str], patterns: Sequence[str], places: Places, statistics: Collection[str] = ()
) -> None:
    """Check that each pattern freezes a parameter, and that at least one parameter is left to train.

    Args:
        names: stored names of all parameters of the whole model.
        patterns: patterns of frozen parameters.
        places: naming scheme of the model's parameters.
        statistics: names of running statistics, which no optimizer trains.

    Raises:
        UserError: a pattern matches no parameter, or the patterns together match all parameters but statistics.
    """
    for pattern in patterns:
        if not _matches(names, pattern, places):
            guess = nearest(pattern, list(names))
            hint = f"did you mean {guess!r}?" if guess else f"names are like {names[0]!r}"
            raise UserError(
                f"training.freeze: no parameter of the model is meant by {pattern!r}; {hint}",
                hint="give stored names, patterns of them such as model.embed_tokens.*, or layers such as layers[:6]",
            )
    if patterns and frozen_names(names, patterns, places).issuperset(set(names).difference(statistics)):
        raise UserError(
            "training.freeze leaves nothing to train",
            hint="freeze less: leave out a pattern, or make one narrower",
        )


def freeze(parameters: Iterable[Named], patterns: Sequence[str], places: Places) -> None:
    """Turn off the gradients of frozen parameters.

    Args:
        parameters: parameters with their stored names.
        patterns: patterns of frozen parameters.
        places: naming scheme of the whole model's parameters.
    """
    given = list(parameters)
    frozen = frozen_names((name for name, _ in given), patterns, places)
    for name, parameter in given:
        if name in frozen:
            parameter.requires_grad_(False)  # noqa: FBT003 - torch has no other way


def trains_before(parameters: Iterable[Named], layer: int, places: Places) -> bool:
    """Return whether any parameter before a layer is trained.

    Args:
        parameters: parameters of the whole model, with their stored names.
        layer: index of the layer.
        places: naming scheme of the model's parameters.
    """
    return any(parameter.requires_grad and places.of(name) < layer for name, parameter in parameters)


def _matches(names: Iterable[str], pattern: str, places: Places) -> list[str]:
    layers = _LAYERS.fullmatch(pattern)
    if layers is None:
        return [name for name in names if fnmatchcase(name, pattern)]
    start, stop = (int(edge) if edge.strip("-") else None for edge in layers.groups())
    chosen = range(places.num_layers)[start:stop]
    return [name for name in names if places.of(name) in chosen]
