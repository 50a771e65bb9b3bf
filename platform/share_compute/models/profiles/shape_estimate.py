"""Cost estimates of a language model's parts from the shapes of parameters and from the configuration.

- A dense matrix takes one multiplication and one addition per parameter and token; backward takes twice as many.
- Attention takes two matrix products over all pairs of tokens; backward takes 2.5 times as many operations.
- In a mixture of experts, only the experts that process a token are counted.
- A layer keeps 10 x hidden + 4 x intermediate scalars per token for its backward, as measured on Llama.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn

from share_compute.models.profiles.profile import FLOAT_BYTES, LayerProfile, QuadraticGrowth

_EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
)
_FORWARD_OPERATIONS, _BACKWARD_OPERATIONS = 5, 9
"""Estimated kernel calls in a layer, per module with parameters.

Rounded up from a Llama layer, which has 9 modules with parameters, 41 calls in the forward and 78 in the backward.
"""
_HEAD_PARTS = 3
"""Number of parts of the head: norm, matrix and loss."""
_LOSS_NUMBERS = 4
"""Number of scalars kept per token and class: the logit, its log-softmax, and the gradients of both."""


def parameters_of(module: nn.Module) -> int:
    """Return the number of parameters of a module, in scalars."""
    return sum(parameter.numel() for parameter in module.parameters())


def frozen_parameters_of(module: nn.Module) -> int:
    """Return the number of a module's frozen parameters, in scalars."""
    return sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)


def largest_trained_of(module: nn.Module) -> int:
    """Return the size of a module's largest trained parameter tensor, in scalars; 0 if none is trained."""
    return max((each.numel() for each in module.parameters() if each.requires_grad), default=0)


class ShapeEstimate:
    """Estimates the cost of one model's parts.

    Args:
        config: the model's Hugging Face configuration, or its text part.
    """

    def __init__(self, config: Any) -> None:
        self._hidden = _option(config, "hidden_size", default=1)
        self._vocabulary = _option(config, "vocab_size", default=1)
        self._intermediate = _option(config, "intermediate_size", default=4 * self._hidden)
        heads = _option(config, "num_attention_heads", default=1)
        head_dim = _option(config, "head_dim", default=self._hidden // heads)
        self._attention = heads * head_dim
        self._keys = _option(config, "num_key_value_heads", default=heads) * head_dim
        self._experts = _option(config, *_EXPERTS_OF_A_TOKEN, default=0)

    def layer(self, module: nn.Module) -> LayerProfile:
        """Return the estimated profile of one layer."""
        products = 2.0 * self._active_parameters(module)
        scores = 4.0 * self._attention
        kept = 10 * self._hidden + 4 * self._intermediate
        parts = sum(bool(part._parameters) for part in module.modules())  # noqa: SLF001 - without parameters of submodules
        return LayerProfile(
            parameters=parameters_of(module),
            frozen=frozen_parameters_of(module),
            largest=largest_trained_of(module),
            forward_flops=QuadraticGrowth(0.0, products, scores),
            backward_flops=QuadraticGrowth(0.0, 2 * products, 2.5 * scores),
            activation_bytes=QuadraticGrowth(0.0, float(FLOAT_BYTES * kept)),
            boundary_numbers=QuadraticGrowth(0.0, float(self._hidden)),
            cache_numbers=QuadraticGrowth(0.0, 2.0 * self._keys),
            forward_operations=_FORWARD_OPERATIONS * parts,
            backward_operations=_BACKWARD_OPERATIONS * parts,
        )

    def embedding(self, module: nn.Module) -> LayerProfile:
        """Return the estimated profile of the modules before the first layer, as lookups without FLOPs."""
        return LayerProfile(
            parameters=parameters_of(module),
            frozen=frozen_parameters_of(module),
            largest=largest_trained_of(module),
            forward_operations=1,
            backward_operations=2,
            activation_bytes=QuadraticGrowth(0.0, float(FLOAT_BYTES * self._hidden)),
            boundary_numbers=QuadraticGrowth(0.0, float(self._hidden)),
        )

    def head(self, parameters: int, tied: int, frozen: int = 0, largest: int = 0) -> LayerProfile:
        """Return the estimated profile of the modules after the last layer, with the loss.

        Args:
            parameters: number of the modules' parameters, without tied ones.
            tied: number of the modules' parameters that are tied to the embedding.
            frozen: number of ``parameters`` that are not trained.
            largest: size of the largest trained parameter tensor, in scalars.
        """
        products = 2.0 * (parameters + tied)
        return LayerProfile(
            parameters=parameters,
            frozen=frozen,
            largest=largest,
            forward_flops=QuadraticGrowth(0.0, products),
            backward_flops=QuadraticGrowth(0.0, 2 * products),
            forward_operations=_HEAD_PARTS * _FORWARD_OPERATIONS,
            backward_operations=_HEAD_PARTS * _BACKWARD_OPERATIONS,
            activation_bytes=QuadraticGrowth(0.0, float(FLOAT_BYTES * _LOSS_NUMBERS * self._vocabulary)),
        )

    def _active_parameters(self, module: nn.Module) -> float:
        """Return the number of parameters that process one token; only chosen experts count."""
        active = 0.0
        for name, part in module.named_modules():
            if name.rpartition(".")[2] != "experts":
                continue
            count = len(part) if isinstance(part, nn.ModuleList) else _rows(part)
            if self._experts and count > self._experts:
                active -= parameters_of(part) * (1 - self._experts / count)
        return parameters_of(module) + active


def _rows(experts: nn.Module) -> int:
    """Return the number of experts in a module that stacks them: the smallest first dimension of its parameters."""
    return min((parameter.shape[0] for parameter in experts.parameters() if parameter.dim()), default=0)


def _option(config: Any, *names: str, default: int) -> int:
    """Return the first of the named options that is a positive integer, or ``default``."""
    for name in names:
        # Configurations with per-layer values raise RuntimeError for options that differ between layers.
        with suppress(RuntimeError):
            value = getattr(config, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return default
