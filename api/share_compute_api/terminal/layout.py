"""Shows where the weights of a result or of a checkpoint are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.markup import escape

from share_compute.planning.plan import layer_span
from share_compute.quantities import bytes_text
from share_compute_api.schemas.layout import LayerWeights, StageEntry, WeightEntry, WeightLayout
from share_compute_api.terminal.output import console, print_table


def layout_items(layout: WeightLayout, *, lists_weights: bool) -> Iterator[dict[str, Any]]:
    """Yield the layers or the weights of a layout for scripts, with the stages and the machines that hold them."""
    for part in layout.weights if lists_weights else layout.layers:
        stages = _stages(layout, part)
        yield {
            **part.model_dump(mode="json"),
            "stages": _numbers(stages),
            "machines": _machines(stages),
        }


def print_layers(layout: WeightLayout) -> None:
    """Print one line for each layer, or for consecutive layers with the same stages and files."""

    def home(part: LayerWeights) -> tuple[int | str | None, tuple[str, ...], list[StageEntry]]:
        is_inside = part.layer is not None and 0 <= part.layer < (layout.num_layers or 0)
        return "inside" if is_inside else part.layer, part.files, _stages(layout, part)

    rows = []
    for (_, files, stages), group in groupby(layout.layers, home):
        parts = list(group)
        rows.append(
            (
                _span(layout, parts),
                *_held(stages),
                sum(part.weights for part in parts),
                bytes_text(sum(part.size_bytes for part in parts)),
                escape(", ".join(files)),
            )
        )
    columns = ("layers", "stage", "machines", "weights", "size", "file")
    print_table(columns, rows, empty="There are no weights.", right=("weights", "size"))
    for name in _tied(layout):
        console.print(f"{escape(name)} is tied: the last stage holds it too.", style="dim")


def print_weights(layout: WeightLayout) -> None:
    """Print one line for each listed weight."""
    rows = [
        (
            escape(weight.name),
            " x ".join(map(str, weight.shape)) or "scalar",
            escape(weight.dtype),
            bytes_text(weight.size_bytes),
            _layer(layout, weight.layer),
            *_held(_stages(layout, weight)),
            escape(weight.file),
        )
        for weight in layout.weights
    ]
    columns = ("name", "shape", "dtype", "size", "layer", "stage", "machines", "file")
    print_table(columns, rows, empty="No weight has such a name.")
    if layout.matched > len(layout.weights):
        console.print(f"{layout.matched - len(layout.weights)} more match; narrow --match.", style="dim")


def _tied(layout: WeightLayout) -> list[str]:
    return [name for part in layout.layers for name in part.tied]


def _stages(layout: WeightLayout, part: LayerWeights | WeightEntry) -> list[StageEntry]:
    is_tied = bool(part.tied) if isinstance(part, LayerWeights) else part.name in _tied(layout)
    return layout.stages_of(part.layer, is_tied=is_tied)


def _held(stages: Sequence[StageEntry]) -> tuple[str | None, str | None]:
    """Return the cells of stages: their numbers, counted from 1, and their machines."""
    numbers = ", ".join(str(number + 1) for number in _numbers(stages))
    return numbers or None, escape(", ".join(_machines(stages))) or None


def _numbers(stages: Sequence[StageEntry]) -> list[int]:
    """Return the numbers of stages, counted from 0."""
    return sorted({stage.stage for stage in stages})


def _machines(stages: Sequence[StageEntry]) -> list[str]:
    return list({id_: name for stage in stages for id_, name in stage.machines.items()}.values())


def _span(layout: WeightLayout, parts: Sequence[LayerWeights]) -> str | None:
    first, last = parts[0].layer, parts[-1].layer
    if first is None or last is None or first == last:
        return _layer(layout, first)
    return layer_span(first, last + 1).removeprefix("layers ")


def _layer(layout: WeightLayout, layer: int | None) -> str | None:
    """Return a layer as text; None if it is unknown."""
    if layer is None:
        return None
    if layer < 0:
        return "before"
    return "after" if layer == layout.num_layers else str(layer)
