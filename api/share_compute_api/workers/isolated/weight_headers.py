"""Reads from the headers of safetensors files where each weight is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from pydantic import ValidationError

from share_compute.errors import UserError
from share_compute.models.adapter_names import SAVED_PREFIX
from share_compute.models.profiles.places import Places
from share_compute_api.schemas.layout import FoundLayout, LayerWeights, WeightEntry
from share_compute_api.workers.isolated.messages import ReadLayout

_MOST_WEIGHTS = 200_000
_MOST_NAME = 1000
_MOST_DIMENSIONS = 100
_MOST_BYTES = 2**63


def layout_of(question: ReadLayout) -> FoundLayout:
    """Return the weights that the headers of safetensors files describe, by layer.

    The format is https://github.com/huggingface/safetensors#format.

    Raises:
        UserError: a header is damaged, or there are more than 200,000 weights.
    """
    weights = [
        weight for file, text in question.headers.items() for weight in _weights(file, text, question.places)
    ]
    if len(weights) > _MOST_WEIGHTS:
        raise UserError(
            f"the files have {len(weights)} weights; at most {_MOST_WEIGHTS} are read",
            hint="download the result, and read it there",
        )
    weights.sort(key=lambda weight: (weight.layer is None, weight.layer or 0, weight.name))
    matching = [
        weight
        for weight in weights
        if question.pattern is not None and fnmatchcase(weight.name, question.pattern)
    ]
    return FoundLayout(
        layers=_by_layer(weights, question.places),
        weights=tuple(matching[: question.most]),
        matched=len(matching),
    )


def _weights(file: str, text: str, places: Places | None) -> Iterator[WeightEntry]:
    try:
        for name, facts in json.loads(text).items():
            if name != "__metadata__":
                yield _weight(file, name, facts, places)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError, ValidationError) as failure:
        raise UserError(f"{file} is damaged", hint="export a checkpoint of the job again") from failure


def _weight(file: str, name: str, facts: Mapping[str, Any], places: Places | None) -> WeightEntry:
    """Return one weight; raise ValueError if its name or its shape is implausibly long."""
    start, stop = facts["data_offsets"]
    if max(len(name), len(facts["dtype"])) > _MOST_NAME or len(facts["shape"]) > _MOST_DIMENSIONS:
        raise ValueError("the name or the shape is too long")
    if not 0 <= start <= stop < _MOST_BYTES:
        raise ValueError("the offsets are wrong")
    return WeightEntry(
        name=name,
        file=file,
        dtype=facts["dtype"],
        shape=facts["shape"],
        size_bytes=stop - start,
        layer=None if places is None else places.layer_of(name.removeprefix(SAVED_PREFIX)),
    )


def _by_layer(weights: list[WeightEntry], places: Places | None) -> tuple[LayerWeights, ...]:
    """Return sums over weights that are sorted by layer."""
    tied = frozenset(() if places is None else places.tied)
    found = []
    for layer, group in groupby(weights, lambda weight: weight.layer):
        part = list(group)
        found.append(
            LayerWeights(
                layer=layer,
                weights=len(part),
                size_bytes=sum(weight.size_bytes for weight in part),
                files=tuple(sorted({weight.file for weight in part})),
                tied=tuple(weight.name for weight in part if weight.name in tied),
            )
        )
    return tuple(found)
