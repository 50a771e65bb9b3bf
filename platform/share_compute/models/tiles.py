"""Computes a block of convolutions and poolings tile by tile of an image.

A layer with kernel size ``k``, stride ``s``, padding ``p`` and dilation ``d`` computes its outputs [a, b) from the
inputs [a * s - p, (b - 1) * s - p + d * (k - 1) + 1). So the outputs of a tile need the inputs of the tile and a halo
around it. Tiles exchange nothing: each computes its halo again. Inputs beyond the image are padding. The backward pass
recomputes each tile, so that only the activations of one tile exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from share_compute.errors import UserError
from share_compute.models.blocks import Residual, Sequential

Span: TypeAlias = tuple[int, int]
"""Rows, or columns, [start, stop)."""
Box: TypeAlias = tuple[Span, Span]
"""Rows and columns of a part of an image."""
Size: TypeAlias = tuple[int, int]
"""Height and width."""
_SIDES = ("height", "width")


class Window(NamedTuple):
    """The inputs from which a layer computes one output, in one dimension."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def reach(self) -> int:
        """Number of inputs from the first to the last input of one output."""
        return self.dilation * (self.kernel - 1) + 1

    def before(self, span: Span) -> Span:
        """Return the inputs of some outputs; they may lie beyond the image."""
        return span[0] * self.stride - self.padding, (span[1] - 1) * self.stride - self.padding + self.reach

    def outputs(self, size: int) -> int:
        """Return the number of outputs for ``size`` inputs; at most 0 if the kernel is larger."""
        return (size + 2 * self.padding - self.reach) // self.stride + 1


class Tiled(nn.Module):
    """A block that computes its output tile by tile. Its parameters keep their names in the block.

    Args:
        block: the block; see `share_compute.specification.layers.reason_against_tiles` for layers that it may have.
        tiles: number of rows and columns of tiles.
        size: height and width of the block's input.

    Raises:
        UserError: a tile is smaller than its halo, or has no outputs; or a padding is not smaller than its kernel.
    """

    def __init__(self, block: Sequential, tiles: Size, size: Size) -> None:
        super().__init__()
        self.layers = block.layers
        self._tiles = tiles
        self._require_inputs_in_windows()
        for side, count, length in zip((0, 1), tiles, size, strict=True):
            self._require_room(side, count, length)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output of the block's layers for images ``[batch, channels, height, width]``.

        Raises:
            UserError: a layer does not fit its input.
        """
        if inputs.is_meta:  # the caller needs only the shape, or the name of the layer that does not fit
            outputs: Tensor = self.layers(inputs)
            return outputs
        rows, columns = self._spans(inputs)
        wants = torch.is_grad_enabled()
        bands = []
        for row in rows:
            parts = []
            for column in columns:
                compute = partial(self.compute_tile, want=(row, column))
                parts.append(
                    checkpoint(compute, inputs, use_reentrant=False, preserve_rng_state=False)
                    if wants
                    else compute(inputs)
                )
            bands.append(torch.cat(parts, dim=-1))
        return torch.cat(bands, dim=-2)

    def compute_tile(self, inputs: Tensor, want: Box) -> Tensor:
        """Return the part ``want`` of the block's output for images ``[batch, channels, height, width]``."""
        layers, size = list(self.layers.values()), _size_of(inputs)
        needed = _clipped(_before(layers, want), size)
        return _computed(layers, _part(inputs, ((0, size[0]), (0, size[1])), needed), needed, size, want)

    def reads(self, size: Size, want: Box) -> Box:
        """Return the part of the input, halo included, that a part of the output depends on."""
        return _clipped(_before(list(self.layers.values()), want), size)

    def boxes(self, size: Size) -> list[Box]:
        """Return the part of the output that each tile computes, row by row, for an input of this size."""
        height, width = _after(list(self.layers.values()), size)
        return [
            (row, column) for row in _cut(height, self._tiles[0]) for column in _cut(width, self._tiles[1])
        ]

    def largest_box(self, size: Size) -> Box:
        """Return the part of the output whose tile reads the most pixels."""

        def pixels(want: Box) -> int:
            (top, bottom), (left, right) = self.reads(size, want)
            return (bottom - top) * (right - left)

        return max(self.boxes(size), key=pixels)

    def _spans(self, inputs: Tensor) -> tuple[list[Span], list[Span]]:
        height, width = _after(list(self.layers.values()), _size_of(inputs))
        return _cut(height, self._tiles[0]), _cut(width, self._tiles[1])

    def _require_inputs_in_windows(self) -> None:
        """Raise UserError if a layer has outputs that depend on padding alone."""
        for layer in self.modules():
            for window in _windows(layer) or ():
                if window.padding >= window.reach:
                    raise UserError(
                        f"data.slicing: a layer of the block has padding {window.padding}, and its kernel reaches over "
                        f"{window.reach} pixels, so some outputs would depend on padding alone",
                        hint="lower padding below the size of the kernel, or leave data.slicing out",
                    )

    def _require_room(self, side: int, count: int, length: int) -> None:
        layers, name = list(self.layers.values()), _SIDES[side]
        outputs = _after(layers, (length, length))[side]
        if outputs < 1:
            return  # a layer does not fit its input, which `forward` reports
        if outputs < count:
            raise UserError(
                f"data.slicing: the {name} of an image is cut into {count} tiles, but the block returns "
                f"{outputs} numbers along it",
                hint="cut into fewer tiles, or end the block before its last pooling",
            )
        tile = length // count
        spans = _cut(outputs, count)
        halos = [
            beyond
            for place, span in enumerate(spans)
            for start, stop in [_before(layers, (span, span))[side]]
            for beyond, is_inside in (
                (place * tile - start, place > 0),
                (stop - (place + 1) * tile, place + 1 < count),
            )
            if is_inside
        ]
        if max(halos, default=0) > tile:
            raise UserError(
                f"data.slicing: a tile has {tile} pixels of an image's {name}, and needs {max(halos)} more on one "
                "side for the kernels of the block",
                hint="cut into fewer tiles, or end the block earlier",
            )


def _size_of(inputs: Tensor) -> Size:
    return inputs.shape[-2], inputs.shape[-1]


def _cut(length: int, count: int) -> list[Span]:
    return [(place * length // count, (place + 1) * length // count) for place in range(count)]


def _windows(layer: nn.Module) -> tuple[Window, Window] | None:
    """Return the windows of a layer's rows and columns; None if each output depends on one input."""
    given: list[Any]
    match layer:
        case nn.Conv2d() | nn.MaxPool2d():
            # Paddings in words cannot be declared.
            given = [layer.kernel_size, layer.stride, layer.padding, layer.dilation]
        case nn.AvgPool2d():
            given = [layer.kernel_size, layer.stride, layer.padding]
        case _:
            return None
    pairs = [each if isinstance(each, Sequence) else (each, each) for each in given]
    pairs = [pair if len(pair) == 2 else (*pair, *pair) for pair in pairs]
    rows, columns = (Window(*(int(pair[side]) for pair in pairs)) for side in (0, 1))
    return rows, columns


def _before(layers: Iterable[nn.Module], want: Box) -> Box:
    """Return the inputs of a part of the layers' output; they may lie beyond the image."""
    for layer in reversed(list(layers)):
        if isinstance(layer, Sequential):
            inner = _before(layer.layers.values(), want)
            short = _before(_shortcut(layer), want) if isinstance(layer, Residual) else inner
            rows, columns = zip(inner, short, strict=True)
            want = _union(*rows), _union(*columns)
        elif (windows := _windows(layer)) is not None:
            want = windows[0].before(want[0]), windows[1].before(want[1])
    return want


def _union(one: Span, other: Span) -> Span:
    return min(one[0], other[0]), max(one[1], other[1])


def _shortcut(layer: Residual) -> list[nn.Module]:
    return [] if layer.projection is None else list(layer.projection.values())


def _after(layers: Iterable[nn.Module], size: Size) -> Size:
    """Return the size of the layers' output; at most 0 in a dimension in which a kernel is larger than its input."""
    for layer in layers:
        if isinstance(layer, Sequential):
            size = _after(layer.layers.values(), size)
        elif (windows := _windows(layer)) is not None:
            size = windows[0].outputs(size[0]), windows[1].outputs(size[1])
    return size


def _clipped(box: Box, size: Size) -> Box:
    """Clip a box to the image; the result has at least one row and one column."""
    (top, bottom), (left, right) = box
    rows, columns = (
        (first := min(max(start, 0), length - 1), max(min(stop, length), first + 1))
        for (start, stop), length in (((top, bottom), size[0]), ((left, right), size[1]))
    )
    return rows, columns


def _part(values: Tensor, held: Box, want: Box) -> Tensor:
    (top, bottom), (left, right) = want
    return values[..., top - held[0][0] : bottom - held[0][0], left - held[1][0] : right - held[1][0]]


def _computed(layers: Sequence[nn.Module], hidden: Tensor, held: Box, size: Size, want: Box) -> Tensor:
    """Return a part of the layers' output.

    Args:
        layers: layers that follow each other.
        hidden: part of their input.
        held: box of this part.
        size: size of the whole input.
        want: box of the part of the output.
    """
    sizes = [size]
    for layer in layers:
        sizes.append(_after([layer], sizes[-1]))
    boxes = [want]
    for place in range(len(layers) - 1, 0, -1):
        boxes.append(_clipped(_before([layers[place]], boxes[-1]), sizes[place]))
    for layer, whole, box in zip(layers, sizes, reversed(boxes), strict=False):
        hidden = _layer_computed(layer, hidden, held, whole, box)
        held = box
    return hidden if layers else _part(hidden, held, want)


def _layer_computed(layer: nn.Module, hidden: Tensor, held: Box, size: Size, want: Box) -> Tensor:
    if isinstance(layer, Sequential):
        outputs = _computed(list(layer.layers.values()), hidden, held, size, want)
        if isinstance(layer, Residual):
            outputs = outputs + _computed(_shortcut(layer), hidden, held, size, want)
        return outputs
    windows = _windows(layer)
    if windows is None:
        result: Tensor = layer(_part(hidden, held, want))
        return result
    needed = _before([layer], want)
    there = _clipped(needed, size)
    rows, columns = (_Padding.of(*each) for each in zip(windows, needed, there, strict=True))
    entering, padding = _part(hidden, held, there), (rows.own, columns.own)
    if any(added := (*columns.added, *rows.added)):
        fill = -torch.inf if isinstance(layer, nn.MaxPool2d) else 0.0
        entering = functional.pad(entering, added, value=fill)
    match layer:
        case nn.Conv2d():
            outputs = functional.conv2d(
                entering, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups
            )
        case nn.MaxPool2d():
            outputs = functional.max_pool2d(
                entering, layer.kernel_size, layer.stride, padding, layer.dilation
            )
        case nn.AvgPool2d():
            outputs = functional.avg_pool2d(
                entering, layer.kernel_size, layer.stride, padding, divisor_override=layer.divisor_override
            )
        case _:
            raise TypeError(f"{type(layer).__name__} cannot be computed in tiles")
    (top, bottom), (left, right) = want
    return outputs[
        ..., rows.skipped : rows.skipped + bottom - top, columns.skipped : columns.skipped + right - left
    ]


class _Padding(NamedTuple):
    """Padding of a tile in one dimension. A tile needs padding only at the edges of the image."""

    own: int
    """Padding that the layer itself adds on both sides, without a copy of the tile."""
    skipped: int
    """Number of outputs, before those of the tile, that are dropped. Outputs after them are dropped, too."""
    added: Span
    """Numbers that are added to a copy of the tile before and after it; negative ones are removed."""

    @classmethod
    def of(cls, window: Window, needed: Span, there: Span) -> _Padding:
        """Return the padding for needed inputs, only some of which are in the image."""
        before, after = there[0] - needed[0], needed[1] - there[1]
        if before == after == 0:
            return cls(0, 0, (0, 0))
        skipped, rest = divmod(window.padding - before, window.stride)
        # The layer applies its own padding, so its outputs can only be used if they are aligned with the wanted ones.
        return cls(window.padding, skipped, (0, 0)) if rest == 0 else cls(0, 0, (before, after))
