"""Measures the times of each layer of a shard during training, so that the planner need not estimate them.

Hooks record the time when one layer ends and the next begins. They change no outputs and no gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from share_compute.models.devices import operations
from share_compute.planning.cost.timings import LayerTiming

_Way: TypeAlias = Literal["forward", "backward"]
_Mark: TypeAlias = Any
"""A point in time, as `DeviceOperations.mark` returns it."""


class _Pass(NamedTuple):
    begin: _Mark
    inner: dict[int, _Mark]
    """Mark of each layer except the last, by layer index.

    In a forward pass, the end of the layer. In a backward pass, the time when the gradient of the layer's output was
    complete."""
    end: _Mark


class LayerTimer:
    """Measures the mean times of each layer over all passes that run inside `timing`, until `finish`.

    Args:
        layers: layers of the shard, by their index in the whole model. The first layer's time includes the modules
            before it (embedding, positions); the last layer's time includes the modules after it (head, loss).
        device: device on which the layers compute.
    """

    def __init__(self, layers: Mapping[int, nn.Module], device: torch.device) -> None:
        self._places = sorted(layers)
        self._device = operations(device)
        self._passes: dict[_Way, list[_Pass]] = {"forward": [], "backward": []}
        self._current: dict[int, _Mark] | None = None
        self._hooks = [layers[place].register_forward_hook(self._ended(place)) for place in self._places[:-1]]

    @contextmanager
    def timing(self, way: _Way) -> Iterator[None]:
        """Time one pass of one microbatch; nothing else may run inside the context."""
        inner: dict[int, _Mark] = {}
        begin, self._current = self._mark(), inner
        try:
            yield
        finally:
            self._current = None
        self._passes[way].append(_Pass(begin, inner, self._mark()))

    def finish(self) -> dict[int, LayerTiming]:
        """Remove the hooks, and return each layer's mean times over all passes, by layer index."""
        for hook in self._hooks:
            hook.remove()
        self._device.synchronize()
        forward, backward = self._means("forward"), self._means("backward")
        return {place: LayerTiming(forward[place], backward[place]) for place in self._places}

    def _mark(self) -> _Mark:
        return self._device.mark()

    def _ended(self, place: int) -> Any:
        def hook(_: nn.Module, _inputs: Any, outputs: Any) -> None:
            if self._current is None:  # outside of `timing`, as in an evaluation
                return
            self._current[place] = self._mark()
            hidden: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
            if hidden.requires_grad:
                hidden.register_hook(lambda _: self._reached(place))  # type: ignore[no-untyped-call]

        return hook

    def _reached(self, place: int) -> None:
        if self._current is not None:
            self._current[place] = self._mark()

    def _means(self, way: _Way) -> dict[int, float]:
        """Return the mean time of each layer between its start mark and its end mark, in seconds."""
        order = self._places if way == "forward" else self._places[::-1]
        times: dict[int, list[float]] = {place: [] for place in order}
        for each in self._passes[way]:
            # In a backward pass, layer i + 1 ends and layer i starts when the gradient of the output of layer i is
            # complete. If this output needs no gradient, the end of the pass replaces this mark.
            bounds = order[:-1] if way == "forward" else order[1:]
            marks = [each.begin, *(each.inner.get(place, each.end) for place in bounds), each.end]
            for place, start, stop in zip(order, marks, marks[1:], strict=False):
                times[place].append(max(0.0, self._device.seconds(start, stop)))
        return {place: fmean(seconds) if seconds else 0.0 for place, seconds in times.items()}
