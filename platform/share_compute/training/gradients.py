"""Accumulates the gradients of microbatches in flat buckets, in the order of a `SummationTree`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
import xxhash
from torch import Tensor, nn

from share_compute.models.devices import operations
from share_compute.models.numbers import is_finite
from share_compute.protocol.tree import Node, SummationTree
from share_compute.specification import FusionSpec
from share_compute.specification.workload import GRADIENT_BUCKET_BYTES
from share_compute.training.shares import WHOLE, OptimizerShare, WeightBuckets, owners, ranges

_AUTO_BUCKETS = 8
"""Number of buckets that the automatic bucket size aims at, so that their reduction overlaps with the backward."""
_AUTO_BYTES = 64 * 2**20
_WORD_BYTES = 4
_ROW = 4096
"""Number of elements in a row. The norm of a row is computed in float32, and the sum over rows in float64."""


class _Buffers:
    """Flat buffers for one gradient of all parameters, one buffer for each bucket."""

    def __init__(self, layout: Sequence[Sequence[nn.Parameter]]) -> None:
        self.buckets: list[Tensor] = []
        self.views: list[tuple[nn.Parameter, Tensor]] = []
        for group in layout:
            sizes = [parameter.numel() for parameter in group]
            bucket = torch.empty(sum(sizes), dtype=group[0].dtype, device=group[0].device)
            self.buckets.append(bucket)
            for parameter, piece in zip(group, torch.split(bucket, sizes), strict=True):
                self.views.append((parameter, piece.view_as(parameter)))


class GradientBuckets:
    """Accumulates the gradients of microbatches in flat buckets. Each ``parameter.grad`` is a view of a bucket.

    For each microbatch, call `begin`, run the backward, and call `finish`. To reduce buckets during the last
    backward, call `watch` before it. Sum the `parts` of each bucket over the members of the stage into its
    `result`, then call `settle`.

    Parameters are put into buckets in reverse order, because a backward usually reaches the last ones first.

    With a share of the optimizer's state, only the `own` ranges of the `result` need to hold the sum. Methods that
    otherwise read the whole sum then read only the gradients of the share.

    Args:
        parameters: parameters by stored name; frozen ones have no gradient.
        tree: order in which the job adds gradients.
        fusion: settings that determine the buckets; None for automatic sizes.
        share: this member's share of the optimizer's state.
        first: stored names of trained parameters that belong to the first share.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tree: SummationTree,
        fusion: FusionSpec | None = None,
        share: OptimizerShare = WHOLE,
        first: Collection[str] = (),
    ) -> None:
        trained = {parameter: name for name, parameter in parameters.items() if parameter.requires_grad}
        self._names = trained
        self._tree = tree
        self._share = share
        indices = owners({name: each.numel() for each, name in trained.items()}, share.total, first)
        self._owner = {parameter: indices[name] for parameter, name in trained.items()}
        self._layout = self._cut(list(reversed(trained)), fusion)
        self.shares = [ranges(group, self._owner, share.total) for group in self._layout]
        """Range of elements of each share of the optimizer's state, by bucket and index of the share."""
        self._held: dict[Node, _Buffers] = {}
        self._additions: list[tuple[_Buffers, _Buffers]] = []
        """Pairs (target, source): each source is still to be added to its target."""
        self._result: _Buffers | None = None
        """Buffers for the stage's sum if this member holds no gradients."""
        self._free: list[_Buffers] = []
        self._in_use = 0
        self._most_in_use = 0
        self._missing = [0] * len(self._layout)
        self._next = 0
        self._on_bucket: Callable[[int], None] | None = None
        for number, group in enumerate(self._layout):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, number=number: self._arrived(number)
                )

    def __len__(self) -> int:
        """Return the number of buckets."""
        return len(self._layout)

    def _cut(self, parameters: list[nn.Parameter], fusion: FusionSpec | None) -> list[list[nn.Parameter]]:
        """Return the parameters of each bucket, ordered by share."""
        groups = _cut(parameters, fusion or FusionSpec())
        return [sorted(group, key=lambda parameter: self._owner[parameter]) for group in groups]

    @property
    def share(self) -> OptimizerShare:
        """This member's share of the optimizer's state."""
        return self._share

    @property
    def own_names(self) -> frozenset[str]:
        """Stored names of the trained parameters of this member's share."""
        index = self._share.number
        return frozenset(name for parameter, name in self._names.items() if self._owner[parameter] == index)

    def weight_buckets(self, fusion: FusionSpec) -> WeightBuckets:
        """Return the buckets in which the members of the stage exchange their updated weights."""
        layout = self._cut(list(reversed(self._names)), fusion)
        are_alike = [*map(len, layout)] == [*map(len, self._layout)]

        def spare(bucket: int) -> Tensor | None:
            return self._free[-1].buckets[bucket] if are_alike and self._free else None

        return WeightBuckets(layout, self._owner, self._share, spare)

    @property
    def bucket_bytes(self) -> list[int]:
        """Size of each bucket in bytes."""
        return [sum(parameter.nbytes for parameter in group) for group in self._layout]

    @property
    def layout(self) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]:
        """Stored names and shapes of the parameters of each tensor in `own`, in the order of the tensor's values."""
        index = self._share.number
        return tuple(
            tuple(
                (self._names[parameter], tuple(parameter.shape))
                for parameter in group
                if self._owner[parameter] == index
            )
            for group, shares in zip(self._layout, self.shares, strict=True)
            if shares[index].stop > shares[index].start
        )

    @property
    def held(self) -> tuple[Node, ...]:
        """Nodes of the summation tree whose sums this member holds, in order.

        Between `begin` and `finish` they include the sums in progress.
        """
        return tuple(sorted(self._held))

    # -- backwards -------------------------------------------------------------------------------------------------

    def begin(self, microbatch: int) -> Callable[[], None]:
        """Prepare the buffers to which the next backward adds the gradient of this microbatch.

        Return a function that makes each ``parameter.grad`` a view of these buffers again. So the backwards of several
        microbatches can alternate.

        If a backward fails, call `reset`, since the held sums may be incomplete.

        Raises:
            ValueError: a held sum already contains the microbatch.
        """
        if any(node.start <= microbatch < node.stop for node in self._held):
            raise ValueError(f"the gradient of microbatch {microbatch} is held already: {self.held}")
        prefix = self._tree.grows(microbatch)
        node = Node(microbatch, microbatch + 1)
        if prefix is not None and prefix in self._held:
            buffers = self._held.pop(prefix)
            node = Node(prefix.start, node.stop)
        else:
            buffers = self._take()
            for bucket in buffers.buckets:
                bucket.zero_()
        _point(buffers)
        merges = list(self._tree.merges(self._held, node))
        self._held[node] = buffers
        for left, right, parent in merges:
            target, source = self._held.pop(left), self._held.pop(right)
            self._additions.append((target, source))
            self._held[parent] = target
        return partial(_point, buffers)

    def watch(self, on_bucket: Callable[[int], None]) -> None:
        """Register ``on_bucket(bucket)``, which is called for each bucket in order once its `parts` are complete.

        Call this method before the last backward, or before `finish` if no backward is left. The order is fixed, so
        that all members reduce the buckets in the same order.
        """
        self._missing = [len(group) for group in self._layout]
        self._next = 0
        self._on_bucket = on_bucket

    def _arrived(self, number: int) -> None:
        if self._on_bucket is None:
            return
        self._missing[number] -= 1
        while self._next < len(self) and self._missing[self._next] <= 0:
            self._complete_next()

    def _complete_next(self) -> None:
        number = self._next
        self._next += 1
        for target, source in self._additions:
            target.buckets[number].add_(source.buckets[number])
        if self._on_bucket is not None:
            self._on_bucket(number)

    def finish(self) -> None:
        """Complete the pending additions after a backward.

        Call the callback of `watch` for the remaining buckets, then unregister it.
        """
        if self._on_bucket is None:
            self._next = 0
        while self._next < len(self):
            self._complete_next()
        self._on_bucket = None
        for _, source in self._additions:
            self._give(source)
        self._additions.clear()

    # -- the sum of the stage --------------------------------------------------------------------------------------

    def parts(self, bucket: int) -> list[Tensor]:
        """Return the flat buffers of a bucket, one for each sum in `held`. The reduction may overwrite them."""
        return [self._held[node].buckets[bucket] for node in self.held]

    def result(self, bucket: int) -> Tensor:
        """Return the flat buffer to write a bucket's sum over the stage to.

        It is the first of `parts`. If this member holds no gradients, it is an uninitialized buffer.
        """
        if self._held:
            return self._held[min(self._held)].buckets[bucket]
        if self._result is None:
            self._result = self._take()
        return self._result.buckets[bucket]

    @property
    def own(self) -> list[Tensor]:
        """This member's share of each `result`, flat; without shares, all of it. Buckets without a share are left out.

        Raises:
            ValueError: the sum is not complete.
        """
        index = self._share.number
        return [
            bucket[shares[index]]
            for bucket, shares in zip(self._whole.buckets, self.shares, strict=True)
            if shares[index].stop > shares[index].start
        ]

    def settle(self) -> None:
        """Make each ``parameter.grad`` a view of the `result` buffers, and release all other buffers.

        Call it when the `result` buffers hold the sum over all microbatches.
        """
        if self._held:
            result = self._held.pop(min(self._held))
        else:
            result, self._result = self._result or self._take(), None
        for buffers in self._held.values():
            self._give(buffers)
        self._held = {self._tree.root: result}
        _point(result)

    def reset(self) -> None:
        """Drop all sums, after the step was applied or discarded. Keep buffers for the next step."""
        self._free += [buffers for _, buffers in self._additions]
        self._free += self._held.values()
        if self._result is not None:
            self._free.append(self._result)
        self._forget()
        del self._free[self._most_in_use :]
        self._most_in_use = 0

    def spoil(self) -> None:
        """Drop all sums and their buffers, after a failed reduction that may still write into these buffers."""
        self._forget()

    def drop_spare(self) -> None:
        """Drop buffers that are not in use, after a failed exchange of weights that may still write into them."""
        self._free.clear()

    def _forget(self) -> None:
        self._held.clear()
        self._additions.clear()
        self._result = None
        self._on_bucket = None
        self._in_use = 0
        for parameter in self._names:
            parameter.grad = None

    # -- the whole sum -----------------------------------------------------------------------------------------------

    def squared_norms(self) -> dict[str, float]:
        """Return the sum of squares of each parameter's gradient, by stored name.

        Raises:
            ValueError: the sum is not complete.
        """
        views = [view for view in self._whole.views if self._owner[view[0]] == self._share.number]
        sums = [_squared_sum(view.view(-1)) for _, view in views]
        names = [self._names[parameter] for parameter, _ in views]
        squares = torch.stack([each.cpu() for each in sums]).tolist() if sums else []
        return dict(sorted(zip(names, squares, strict=True)))

    @property
    def is_finite(self) -> bool:
        """Whether all numbers of the held sums are finite."""
        return all(is_finite(bucket) for buffers in self._held.values() for bucket in buffers.buckets)

    def scale(self, factor: float) -> None:
        """Multiply the complete sum of gradients by ``factor``.

        Raises:
            ValueError: the sum is not complete.
        """
        for part in self.own:
            part.mul_(factor)

    def digest(self) -> str:
        """Return a fast hash (XXH3, 128 bits) of the complete sum's bits, to compare the members of a stage.

        On a device other than the CPU, only the sum of each bucket's words is hashed, to avoid copying all gradients.

        Raises:
            ValueError: the sum is not complete.
        """
        hashed = xxhash.xxh3_128()
        for part in self.own:
            values = part.view(torch.int32 if part.element_size() == _WORD_BYTES else torch.int16)
            digested = values if values.device.type == "cpu" else values.sum(dtype=torch.int64).cpu()
            hashed.update(digested.numpy().data)
        return hashed.hexdigest()

    @property
    def _whole(self) -> _Buffers:
        if self._tree.root not in self._held:
            raise ValueError(f"the sum is not complete: {self.held}")
        return self._held[self._tree.root]

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _take(self) -> _Buffers:
        self._in_use += 1
        self._most_in_use = max(self._most_in_use, self._in_use)
        return self._free.pop() if self._free else _Buffers(self._layout)

    def _give(self, buffers: _Buffers) -> None:
        self._in_use -= 1
        self._free.append(buffers)


def _point(buffers: _Buffers) -> None:
    for parameter, view in buffers.views:
        parameter.grad = view


def _squared_sum(flat: Tensor) -> Tensor:
    """Return the sum of squares as a scalar tensor in float64."""
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    if not operations(flat.device).facts.has_float64:
        rows, rest = rows.cpu(), rest.cpu()
    rows, rest = rows.double(), rest.double()
    squared: Tensor = rows.dot(rows) + rest * rest
    return squared


def _cut(parameters: Sequence[nn.Parameter], fusion: FusionSpec) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each bucket. All parameters of a bucket have one type and device."""
    total = sum(parameter.nbytes for parameter in parameters)
    edges = {0, len(parameters)}
    if fusion.mode == "index":
        edges |= {cut for cut in fusion.cuts or () if cut < len(parameters)}
    else:
        limit = fusion.bucket_bytes or min(_AUTO_BYTES, max(GRADIENT_BUCKET_BYTES, total // _AUTO_BUCKETS))
        size = 0
        for place, parameter in enumerate(parameters):
            if size and size + parameter.nbytes > limit:
                edges.add(place)
                size = 0
            size += parameter.nbytes
    for place, (one, other) in enumerate(pairwise(parameters), start=1):
        if (one.dtype, one.device) != (other.dtype, other.device):
            edges.add(place)
    for start, stop in pairwise(sorted(edges)):
        yield list(parameters[start:stop])


def clip_factor(norm: float, limit: float) -> float:
    """Return the gradient-clipping factor, at most 1, that limits the global norm ``norm`` to ``limit``."""
    return min(1.0, limit / (norm + 1e-6))
