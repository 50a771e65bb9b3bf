"""The numerics of merges: sums of contributions, outer optimizers, and elastic averaging.

All functions are pure: they change no input. Each value is computed separately and in a fixed order, by operations that
round once. So the bits depend neither on the number of threads nor on the place of tensors in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from share_compute.errors import VerificationFailed
from share_compute.models.numbers import is_finite
from share_compute.models.storage.slots import slot_name
from share_compute.specification.synchronization import (
    OuterAdamSpec,
    OuterNesterovSpec,
    OuterSgdSpec,
    OuterSpec,
)
from share_compute.synchronization.records import BranchRun, MergeRecord

Tensors: TypeAlias = Mapping[str, Tensor]
"""Float32 tensors by parameter name."""


def difference(after: Tensors, before: Tensors) -> dict[str, Tensor]:
    """Return the contribution of a run: the change of the weights in the run."""
    return {name: after[name] - value for name, value in before.items()}


def combine(contributions: Sequence[Tensors], coefficients: Sequence[float]) -> dict[str, Tensor]:
    """Return the sum of contributions times their coefficients, added in the given order.

    With coefficients that sum to 1 this is the weighted mean of FedAvg (McMahan et al. 2017, arXiv 1602.05629).

    Args:
        contributions: at least one; all have the same names and shapes.
        coefficients: factor of each contribution.
    """
    total = {name: value * coefficients[0] for name, value in contributions[0].items()}
    for contribution, coefficient in zip(contributions[1:], coefficients[1:], strict=True):
        for name, value in contribution.items():
            # Two operations: one fused operation would round elements at the ends of threads' ranges differently.
            total[name] += value * coefficient
    return total


def outer_state(outer: OuterSpec, weights: Tensors) -> dict[str, Tensor]:
    """Return the outer optimizer's state before its first step: ``{"<parameter>::<slot>": zeros}``."""
    match outer:
        case OuterSgdSpec():
            return {}
        case OuterNesterovSpec():
            return {slot_name(name, "momentum"): torch.zeros_like(value) for name, value in weights.items()}
        case OuterAdamSpec():
            state = {slot_name(name, "step"): torch.zeros(()) for name in weights}
            for slot in ("exp_avg", "exp_avg_sq"):
                state |= {slot_name(name, slot): torch.zeros_like(value) for name, value in weights.items()}
            return state


def outer_step(
    outer: OuterSpec, weights: Tensors, change: Tensors, state: Tensors
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the next weights and the next state of the outer optimizer.

    The outer gradient of DiLoCo is the negative change. With d = change, the steps are those of ``torch.optim``:

    - sgd: w + rate * d
    - nesterov: m' = momentum * m + d; w + rate * (d + momentum * m')
    - adam: m' = b1 m + (1 - b1) d; v' = b2 v + (1 - b2) d^2;
      w + rate * (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + epsilon)

    Sources: DiLoCo (arXiv 2311.08105, algorithm 1); FedAdam (Reddi et al. 2021, arXiv 2003.00295).
    """
    following: dict[str, Tensor] = {}
    next_state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        delta = change[name]
        match outer:
            case OuterSgdSpec():
                step = delta
            case OuterNesterovSpec():
                momentum = state[slot_name(name, "momentum")] * outer.momentum + delta
                next_state[slot_name(name, "momentum")] = momentum
                step = momentum * outer.momentum + delta
            case OuterAdamSpec():
                step, slots = _adam(
                    outer,
                    delta,
                    {slot: state[slot_name(name, slot)] for slot in ("step", "exp_avg", "exp_avg_sq")},
                )
                next_state |= {slot_name(name, slot): value for slot, value in slots.items()}
        following[name] = weight + step * outer.learning_rate
    return following, next_state


def _adam(outer: OuterAdamSpec, delta: Tensor, slots: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
    first, second = outer.betas
    count = slots["step"] + 1
    mean = slots["exp_avg"] * first + delta * (1 - first)
    square = slots["exp_avg_sq"] * second + delta * delta * (1 - second)
    corrected = mean / (1 - first ** float(count))
    scale = (square / (1 - second ** float(count))).sqrt() + outer.epsilon
    return corrected / scale, {"step": count, "exp_avg": mean, "exp_avg_sq": square}


def apply_merge(
    record: MergeRecord,
    contributions: Mapping[BranchRun, Tensors],
    outer: OuterSpec,
    weights: Tensors,
    state: Tensors,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights and the outer optimizer's state of the version that a record makes.

    Elastic averaging and parameter servers have the outer optimizer sgd with learning rate 1.

    Args:
        record: the merge record.
        contributions: tensors of the runs in the record; others are ignored.
        outer: the outer optimizer.
        weights: weights of the previous version.
        state: state of the outer optimizer.

    Raises:
        VerificationFailed: a contribution is missing or does not fit the weights.
    """
    found = []
    for run in record.runs:
        if run not in contributions:
            raise VerificationFailed(
                f"the contribution of branch {run.branch} to round {run.round} is missing",
                hint="run the branch again from the weights of that round",
            )
        require_fitting(contributions[run], weights, run)
        found.append(contributions[run])
    change = combine(found, [term.coefficient for term in record.terms])
    return outer_step(outer, weights, change, state)


def mix(own: Tensors, neighbours: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return the weights of a branch after averaging with neighbours: x + sum of w_j (x_j - x).

    The mean of all branches stays the same if each edge is used in both directions with the same weight.

    Source: Xiao and Boyd 2004, doi 10.1016/j.sysconle.2004.02.022.

    Args:
        own: weights of the branch.
        neighbours: weights of the neighbours; without neighbours, nothing changes.
        weights: weight of each neighbour.
    """
    if not neighbours:
        return dict(own)
    change = combine([difference(each, own) for each in neighbours], weights)
    return {name: value + change[name] for name, value in own.items()}


def elastic_pull(weights: Tensors, centre: Tensors, coefficient: float) -> dict[str, Tensor]:
    """Return the weights of a branch after elastic averaging: x - coefficient * (x - centre).

    The centre moves by the same amount in the other direction when the same record is applied to it (EASGD, arXiv
    1412.6651, eq. 5 and 6).

    Args:
        weights: weights of the branch, x.
        centre: the centre before the merge.
        coefficient: coefficient of the contribution in the record; the rate, if the contribution was not late.
    """
    return {name: value - (value - centre[name]) * coefficient for name, value in weights.items()}


def mean(weights: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the mean of weights that all have the same names and shapes."""
    return combine(weights, [1.0 / len(weights)] * len(weights))


def require_fitting(contribution: Tensors, weights: Tensors, run: BranchRun) -> None:
    """Check that a contribution has the names, shapes and type of the weights, and is finite.

    Raises:
        VerificationFailed: the contribution does not fit.
    """
    problem = _problem(contribution, weights)
    if problem:
        raise VerificationFailed(
            f"the contribution of branch {run.branch} to round {run.round} is damaged: {problem}",
            hint="run the branch again on another island; if it happens there too, lower the learning rate",
        )


def _problem(contribution: Tensors, weights: Tensors) -> str:
    if contribution.keys() != weights.keys():
        odd = sorted(contribution.keys() ^ weights.keys())[0]
        return f"only one of it and the weights has {odd}"
    for name, weight in weights.items():
        value = contribution[name]
        if value.shape != weight.shape or value.dtype != torch.float32:
            return f"{name} is {value.dtype} {list(value.shape)}, not float32 {list(weight.shape)}"
        if not is_finite(value):
            return f"{name} is not finite"
    return ""
