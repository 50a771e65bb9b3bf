"""Divide the layers of a serving stage between ranks, each of which has the KV cache of some heads.

The cuts follow the architecture's plan in transformers (``_tp_plan``), which follows Megatron-LM (arXiv:1909.08053). A
``colwise`` linear layer computes some of the outputs on each rank. The next ``rowwise`` layer has the weights for these
outputs, and the sum over all ranks is its whole output. The experts of a mixture are cut in the same way: each rank
has a part of the width of every expert (decision 50).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from share_compute.errors import UserError
from share_compute.inference.runtime.kv_slots import LayerCache
from share_compute.inference.runtime.quantization import Int8Linear
from share_compute.models.blueprint import Blueprint
from share_compute.models.huggingface.decoder import PassThrough, trained_sketch
from share_compute.models.huggingface.experts import is_experts
from share_compute.models.huggingface.sizes import KV_HEAD_KEYS, whole_number

_COLUMNS, _ROWS, _GATHERED = "colwise", "rowwise", "colwise_gather_output"
_EXPERTS, _PACKED = "moe_tp_experts", "packed_colwise"
"""Style of a module with the experts of a mixture; and of its parameter with two matrices, one below the other."""
_WHOLE = frozenset({"replicated_with_grad_allreduce", "replicate"})
"""Styles of modules that each rank computes as a whole."""
_WIDTH_STEP = 8
"""Number whose multiples are the widths of experts for which torch has grouped products in all floating-point types."""
_HINT = "set parallelism.tensor to a number that divides the sizes of the model"
_ALIGNMENT = 64
"""Bytes to whose multiples tensors in shared memory are aligned."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class RankGroup(Protocol):
    """The ranks of a member, seen from one rank. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Number of this rank; 0 is the member itself."""

    @property
    def count(self) -> int:
        """Number of ranks."""

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, with the same bits on each."""

    def gather(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated along the last dimension; other ranks return ``part``."""


class SummedLinear(nn.Module):
    """A linear layer that divides its inputs between the ranks.

    Args:
        layer: this rank's part, without bias.
        bias: bias of the whole layer, ``[out]``.
        group: the ranks.
    """

    def __init__(self, layer: nn.Module, bias: Tensor | None, group: RankGroup) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("bias", bias, persistent=False)
        self._sum = group.sum

    @property
    def weight(self) -> Any:
        """Weights of this rank's part; some models read their dtype."""
        return self.layer.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply this rank's part of the inputs, ``[..., in / ranks]``; return the whole outputs ``[..., out]``."""
        outputs = self._sum(self.layer(inputs))
        bias = self._buffers["bias"]  # faster than an attribute lookup
        return outputs if bias is None else outputs + bias

    __call__ = forward
    """Alias that bypasses `nn.Module.__call__`, which searches for hooks."""


class GatheredLinear(nn.Module):
    """A linear layer that divides its outputs between the ranks; the first rank gathers all outputs.

    Args:
        layer: this rank's part.
        group: the ranks.
    """

    def __init__(self, layer: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.layer = layer
        self._gather = group.gather

    @property
    def weight(self) -> Any:
        """Weights of this rank's part; some models read their dtype."""
        return self.layer.weight

    def forward(self, inputs: Tensor) -> Tensor:
        """Multiply ``[..., in]``; return ``[..., out]`` on the first rank, and this rank's part on others."""
        return self._gather(self.layer(inputs))

    __call__ = forward
    """Alias that bypasses `nn.Module.__call__`, which searches for hooks."""


class SummedExperts(nn.Module):
    """The experts of a mixture, of each of which every rank has a part of the width.

    All ranks use the first rank's choices of experts. Otherwise a near tie that two ranks decide differently would add
    parts of different experts.

    Args:
        experts: this rank's part.
        group: the ranks.
    """

    def __init__(self, experts: nn.Module, group: RankGroup) -> None:
        super().__init__()
        self.experts = experts
        self._chooses = group.rank == 0
        self._sum = group.sum

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token, ``[tokens, hidden]``.

        Args:
            hidden: hidden states ``[tokens, hidden]``.
            index: chosen experts of each token, ``[tokens, chosen]``.
            weights: weights of the chosen experts, ``[tokens, chosen]``.
        """
        own = torch.cat((index.float(), weights.float()), 1)
        choices = self._sum(own if self._chooses else torch.zeros_like(own))
        first_index, first_weights = choices.chunk(2, 1)
        return self._sum(self.experts(hidden, first_index.to(index.dtype), first_weights.to(weights.dtype)))

    __call__ = forward
    """Alias that bypasses `nn.Module.__call__`, which searches for hooks."""


class TensorPlan:
    """The linear layers of a stage that ranks divide, and the experts of mixtures.

    Args:
        model: model of transformers that has only the stage's layers.
        layers: the stage's layers, by index.
        caches: shapes of the keys and values of the whole layers.
        count: number of ranks.

    Raises:
        UserError: transformers has no plan for this architecture, or one with other cuts; or sizes are not divisible.
    """

    def __init__(
        self, model: Any, layers: Mapping[int, nn.Module], caches: Sequence[LayerCache], count: int
    ) -> None:
        self._model = model
        self._count = count
        self._type = model.config.get_text_config().model_type
        self._styles: dict[str, str] = dict(model._tp_plan or {})  # noqa: SLF001 - it has no public name
        names = {id(module): name for name, module in model.named_modules()}
        self._names = {id(layer): names[id(layer)] for layer in layers.values()}
        for layer in layers.values():
            self._check(names[id(layer)], layer)
        self.caches = [self._part_of(cache) for cache in caches]
        """Shapes of the keys and values that each rank has."""

    def _part_of(self, cache: LayerCache) -> LayerCache:
        if cache.heads % self._count:
            raise _uneven_heads(self._count, cache.heads)
        return LayerCache(cache.heads // self._count, cache.key_size, cache.value_size)

    def _style(self, name: str) -> str | None:
        key = _NUMBER.sub(".*", name)
        # Qwen2-MoE's plan omits its shared expert, which is a module like the MLP of its other layers.
        return self._styles.get(key) or self._styles.get(key.replace(".shared_expert.", "."))

    def _check(self, path: str, layer: nn.Module) -> None:
        tensors = {f"{path}.{name}": parameter for name, parameter in layer.named_parameters()}
        blocks: dict[str, set[str]] = defaultdict(set)
        """Styles of the linear layers of attention, and of the MLP, by the path of their module."""
        divided, mixtures = set(), set()
        for name, module in [(f"{path}.{name}", module) for name, module in layer.named_modules()]:
            style = self._style(name)
            if style is None or style in _WHOLE:
                continue
            divided.add(name)
            if style == _EXPERTS:
                self._check_experts(name, module)
                blocks[name] = {_COLUMNS, _ROWS}
                mixtures.add(name)
                continue
            if style not in (_COLUMNS, _ROWS) or not _is_linear(module):
                raise self._unplanned()
            size = module.in_features if style == _ROWS else module.out_features
            if size % self._count:
                sizes = f"{size} inputs" if style == _ROWS else f"{size} outputs"
                raise _refused(f"{self._count} ranks cannot share the {sizes} of {name} evenly", _HINT)
            blocks[name.rpartition(".")[0]].add(style)
        # Both attention and the MLP must be divided. Their other matrices, such as norms of each head, stay whole.
        has_whole_matrix = any(
            tensor.dim() > 1 and name.rpartition(".")[0] not in divided
            for name, tensor in tensors.items()
            if name.startswith(tuple(f"{block}." for block in blocks))
        )
        # Shared experts are in the same part of the layer as the others.
        parts = {block[len(path) + 1 :].partition(".")[0] for block in blocks}
        is_divided = len(parts) > 1 and all(styles == {_COLUMNS, _ROWS} for styles in blocks.values())
        has_own_style = any(self._style(name) and name.rpartition(".")[0] not in mixtures for name in tensors)
        if not is_divided or has_whole_matrix or has_own_style:
            raise self._unplanned()

    def _check_experts(self, path: str, module: nn.Module) -> None:
        styles = {name: self._style(f"{path}.{name}") for name, _ in module.named_parameters()}
        if not is_experts(module) or set(styles.values()) != {_PACKED, _ROWS}:
            raise self._unplanned()
        for name, parameter in module.named_parameters():
            size, full = parameter.shape[-1], f"{path}.{name}"
            if styles[name] == _ROWS and size % (self._count * _WIDTH_STEP):
                raise _refused(
                    f"{self._count} ranks cannot share the {size} inputs of {full} in multiples of {_WIDTH_STEP}",
                    _HINT,
                )

    def _unplanned(self) -> UserError:
        return _refused(
            f"transformers has no plan for architecture {self._type!r} that gives each rank its own heads",
            "set parallelism.tensor to 1, or choose an architecture such as llama, qwen3, gemma3 or mistral",
        )

    def cut_layer(self, layer: nn.Module, group: RankGroup) -> None:
        """Keep only this rank's part of a layer, in newly allocated memory."""
        path = self._names[id(layer)]
        for parent_name, parent in list(layer.named_modules()):
            for name, child in list(parent.named_children()):
                full = ".".join(filter(None, (path, parent_name, name)))
                style = self._style(full)
                if style == _COLUMNS:
                    setattr(parent, name, _columns(child, group))
                elif style == _ROWS:
                    setattr(parent, name, SummedLinear(_rows(child, group), _own(child.bias), group))
                elif style == _EXPERTS:
                    self._cut_experts(full, child, group)
                    setattr(parent, name, SummedExperts(child, group))
        _own_tensors(layer)

    def _cut_experts(self, path: str, experts: nn.Module, group: RankGroup) -> None:
        for name, parameter in list(experts.named_parameters()):
            whole = parameter.detach()
            if self._style(f"{path}.{name}") == _PACKED:
                first, second = (_slice(half, 1, group) for half in whole.chunk(2, 1))
                own = torch.cat((first, second), 1)
            else:
                own = _slice(whole, 2, group)
            setattr(experts, name, nn.Parameter(own, requires_grad=False))

    def cut_head(self, group: RankGroup, tied: Mapping[str, str]) -> Tensor | None:
        """Divide the head between the ranks; if it cannot be divided, the first rank computes it alone.

        Args:
            group: the ranks.
            tied: names of tied tensors and of their sources.

        Returns:
            This rank's weights if the head shares them with the embedding.
        """
        for name, head in list(self._model.named_children()):
            if self._style(name) != _GATHERED or not _is_linear(head):
                continue
            if head.out_features % group.count:
                if group.rank:
                    setattr(self._model, name, PassThrough())
                return None
            part = _columns(head, group)
            setattr(self._model, name, GatheredLinear(part, group))
            if f"{name}.weight" in tied:
                weight: Tensor = part.weight
                return weight
            _own_tensors(part)
        return None


def require_divisible(config: Mapping[str, Any], ranks: int) -> None:
    """Check that ranks can divide the layers of a language model; its weights are on the meta device.

    Args:
        config: Hugging Face configuration of the model.
        ranks: number of ranks.

    Raises:
        UserError: the configuration is invalid, or as in `TensorPlan`.
    """
    model, outline = trained_sketch(Blueprint(config=dict(config)))
    layers = dict(enumerate(getattr(outline.base, outline.layers)))
    heads = whole_number(model.config.get_text_config().to_dict(), *KV_HEAD_KEYS)
    if heads is not None and heads % ranks:
        raise _uneven_heads(ranks, heads)
    TensorPlan(model, layers, (), ranks)


def _uneven_heads(ranks: int, heads: int) -> UserError:
    return _refused(
        f"{ranks} ranks cannot share {heads} KV heads evenly",
        "set parallelism.tensor to a number that divides the KV heads",
    )


def _refused(problem: str, hint: str) -> UserError:
    return UserError(f"parallelism.tensor: {problem}", hint=hint)


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Int8Linear)


def _own(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _own_tensors(module: nn.Module) -> None:
    """Copy the tensors of a module from shared memory to newly allocated memory."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    for owner, name, buffer in _persistent_buffers(module):
        owner._buffers[name] = buffer.clone()  # noqa: SLF001 - it has no public name


def _slice(whole: Tensor, dimension: int, group: RankGroup) -> Tensor:
    """Return this rank's slice of a tensor."""
    return whole.chunk(group.count, dimension)[group.rank]


def _columns(layer: Any, group: RankGroup) -> Any:
    """Return the part of a linear layer that computes this rank's outputs."""
    size = layer.out_features // group.count
    first = size * group.rank
    part = _blank(layer, layer.in_features, size, has_bias=layer.bias is not None)
    for name, parameter in layer.named_parameters():
        rows = parameter.detach()[first : first + size]
        setattr(part, name, nn.Parameter(rows, requires_grad=False))
    return part


def _rows(layer: Any, group: RankGroup) -> Any:
    """Return the part of a linear layer for this rank's inputs, without bias."""
    size = layer.in_features // group.count
    first = size * group.rank
    part = _blank(layer, size, layer.out_features, has_bias=False)
    for name, parameter in layer.named_parameters():
        if name == "bias":
            continue
        whole = parameter.detach()
        own = whole if whole.dim() == 1 else whole[:, first : first + size]  # scales belong to outputs
        setattr(part, name, nn.Parameter(own, requires_grad=False))
    return part


def _blank(layer: Any, inputs: int, outputs: int, *, has_bias: bool) -> Any:
    with torch.device("meta"):
        plain = nn.Linear(inputs, outputs, bias=has_bias)
    return Int8Linear(plain) if isinstance(layer, Int8Linear) else plain


# -- shared memory -------------------------------------------------------------------------------------------------


class SharedTensors:
    """The tensors of a stage in the order in which all ranks place them in shared memory, in several parts.

    Each layer is a part, so that its memory is freed as soon as all ranks have copied their parts of it. Each other
    tensor is a part, too.

    Args:
        model: model of transformers, in which only the stage's layers compute.
        layers: the stage's layers.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        groups = [list(_places(layer)) for layer in layers]
        inside = {id(tensor) for group in groups for _, _, tensor in group}
        self._parts = [*groups, *([place] for place in _places(model) if id(place[2]) not in inside)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [sum(_aligned(tensor.nbytes) for _, _, tensor in part) for part in self._parts]

    def place(self, memories: Sequence[Tensor]) -> None:
        """Move all tensors into memory, without their values.

        Args:
            memories: memory of each part, ``[bytes]``, uint8.
        """
        for part, memory in zip(self._parts, memories, strict=True):
            start = 0
            for owner, name, tensor in part:
                view = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                start += _aligned(tensor.nbytes)
                if isinstance(tensor, nn.Parameter):
                    tensor.data = view
                else:
                    owner._buffers[name] = view  # noqa: SLF001 - it has no public name
        self._parts.clear()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_Place = tuple[nn.Module, str, Tensor]
"""Owner and name of a tensor, and the tensor."""


def _places(module: nn.Module) -> Iterator[_Place]:
    seen = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield owner, name, parameter
    yield from _persistent_buffers(module)


def _persistent_buffers(module: nn.Module) -> Iterator[_Place]:
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:  # noqa: SLF001 - it has no public name
                yield owner, name, buffer
