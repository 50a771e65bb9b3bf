"""Numerics of merges: identities of the papers, and the same bits from the same record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from share_compute.errors import VerificationFailed
from share_compute.specification.synchronization import (
    ElasticSpec,
    LocalSpec,
    OuterAdamSpec,
    OuterNesterovSpec,
    OuterSgdSpec,
    OuterSpec,
    ParameterServerSpec,
)
from share_compute.synchronization.graphs import edges_of, metropolis_weights
from share_compute.synchronization.merging import (
    apply_merge,
    combine,
    difference,
    elastic_pull,
    mix,
    outer_state,
    outer_step,
    require_fitting,
)
from share_compute.synchronization.records import (
    BranchRun,
    Contribution,
    MergeRecord,
    MergeTerm,
    age_scale,
    coefficients,
)

Tensors = dict[str, Tensor]


def drawn(seed: int, scale: float = 1.0) -> Tensors:
    source = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(*shape, generator=source)
        for name, shape in (("matrix", (5, 7)), ("bias", (5,)))
    }


def a_record(number: int, factors: Mapping[int, float]) -> MergeRecord:
    return MergeRecord(
        number,
        tuple(
            MergeTerm(Contribution(BranchRun(number, branch), 1.0, "digest"), coefficient)
            for branch, coefficient in factors.items()
        ),
    )


def farthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# -- sums and outer optimizers -------------------------------------------------------------------------------------


def test_a_combination_adds_in_the_given_order_without_fused_operations() -> None:
    parts, factors = [drawn(seed) for seed in range(3)], [0.2, 0.3, 0.5]
    expected = parts[0]["matrix"] * 0.2 + parts[1]["matrix"] * 0.3 + parts[2]["matrix"] * 0.5
    assert torch.equal(combine(parts, factors)["matrix"], expected)
    assert torch.equal(parts[0]["matrix"], drawn(0)["matrix"]), "inputs do not change"


@pytest.mark.parametrize(
    ("outer", "oracle"),
    [
        (OuterSgdSpec(learning_rate=0.4), lambda given: torch.optim.SGD(given, lr=0.4)),
        (OuterNesterovSpec(), lambda given: torch.optim.SGD(given, lr=0.7, momentum=0.9, nesterov=True)),
        (OuterAdamSpec(), lambda given: torch.optim.Adam(given, lr=0.3, betas=(0.9, 0.95), eps=0.1)),
    ],
)
def test_outer_optimizers_are_those_of_torch_on_the_negative_change(
    outer: OuterSpec, oracle: Callable[[Any], torch.optim.Optimizer]
) -> None:
    weights, state = drawn(0), outer_state(outer, drawn(0))
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    optimizer = oracle(parameters.values())
    for step in range(1, 6):
        change = drawn(step, 0.1)
        for name, parameter in parameters.items():
            parameter.grad = -change[name]
        optimizer.step()
        weights, state = outer_step(outer, weights, change, state)
        assert state.keys() == outer_state(outer, weights).keys()
        assert farthest(weights, {name: each.detach() for name, each in parameters.items()}) < 1e-6


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    source = torch.Generator().manual_seed(0)
    parts = [{"w": torch.randn(100_003, generator=source)} for _ in range(4)]
    record, before = a_record(1, dict.fromkeys(range(4), 0.25)), torch.get_num_threads()
    contributions = dict(zip(record.runs, parts, strict=True))
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for outer in (OuterNesterovSpec(), OuterAdamSpec()):
                state = outer_state(outer, parts[0])
                results.append(apply_merge(record, contributions, outer, parts[0], state)[0]["w"])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[place], results[place % 2]) for place in range(len(results)))


# -- policies ------------------------------------------------------------------------------------------------------


def gradient(weights: Tensors, batch: Tensor) -> Tensors:
    """Return the gradient of a least-squares loss with targets 0."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    loss = ((batch @ leaves["matrix"].T + leaves["bias"]) ** 2).mean()
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True))


def test_one_step_and_the_mean_are_allreduce() -> None:
    """Local SGD with H = 1, plain SGD and outer learning rate 1 is synchronous SGD, also with unequal shares."""
    batches = [torch.randn(size, 7, generator=torch.Generator().manual_seed(size)) for size in (4, 8, 8, 12)]
    local, synchronous = drawn(0), drawn(0)
    for number in range(1, 21):
        contributions = {}
        for branch, batch in enumerate(batches):
            found = gradient(local, batch)
            after = {name: value - 0.1 * found[name] for name, value in local.items()}
            contributions[BranchRun(number, branch)] = difference(after, local)
        given = [Contribution(run, len(batches[run.branch]), "digest") for run in contributions]
        factors = dict(enumerate(coefficients(LocalSpec(branches=4), given, number)))
        local, _ = apply_merge(a_record(number, factors), contributions, OuterSgdSpec(), local, {})
        found = gradient(synchronous, torch.cat(batches))
        synchronous = {name: value - 0.1 * found[name] for name, value in synchronous.items()}
    assert farthest(local, synchronous) < 1e-6


def test_elastic_averaging_follows_its_closed_form_on_a_quadratic() -> None:
    """On h/2 x^2, H steps multiply x by a = (1 - rate h)^H, so centre and mean follow the power of a 2 x 2 matrix."""
    branches, rate, curvature, learning_rate, steps, rounds = 4, 0.2, 1.5, 0.1, 3, 12
    policy = ElasticSpec(branches=branches, rate=rate)
    starts = [4.0, -1.0, 2.5, 0.5]
    own = [{"x": torch.tensor([start])} for start in starts]
    centre: dict[str, Tensor] = {"x": torch.tensor([1.0])}
    for number in range(1, rounds + 1):
        contributions = {}
        for branch, weights in enumerate(own):
            x = weights["x"]
            for _ in range(steps):
                x = x - learning_rate * curvature * x
            own[branch] = {"x": x}
            contributions[BranchRun(number, branch)] = difference(own[branch], centre)
        given = [Contribution(run, 1.0, "digest") for run in contributions]
        factors = coefficients(policy, given, number)
        record, before = a_record(number, dict(enumerate(factors))), centre
        centre, _ = apply_merge(record, contributions, OuterSgdSpec(), centre, {})
        own = [elastic_pull(weights, before, factors[branch]) for branch, weights in enumerate(own)]
    decay = (1 - learning_rate * curvature) ** steps
    matrix = np.array([[1 - branches * rate, branches * rate * decay], [rate, (1 - rate) * decay]])
    expected_centre, expected_mean = np.linalg.matrix_power(matrix, rounds) @ [1.0, np.mean(starts)]
    assert float(centre["x"]) == pytest.approx(expected_centre, abs=1e-6)
    for start, weights in zip(starts, own, strict=True):
        spread = ((1 - rate) * decay) ** rounds * (start - np.mean(starts))
        assert float(weights["x"]) == pytest.approx(expected_mean + spread, abs=1e-6)


def gossip_round(weights: list[Tensors], rows: Mapping[int, Mapping[int, float]]) -> list[Tensors]:
    return [
        mix(each, [weights[other] for other in rows[branch]], list(rows[branch].values()))
        for branch, each in enumerate(weights)
    ]


def spread_of(weights: list[Tensors]) -> float:
    stacked = torch.stack([each["w"].double() for each in weights])
    return float((stacked - stacked.mean(0)).norm())


@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_gossip_keeps_the_mean_and_contracts_by_the_second_eigenvalue(graph: Any) -> None:
    branches, rounds = 16, 12
    rows = metropolis_weights(edges_of(graph, branches, 0, 1), branches)
    matrix = np.zeros((branches, branches))
    for branch, row in rows.items():
        for neighbour, weight in row.items():
            matrix[branch, neighbour] = weight
    matrix += np.diag(1 - matrix.sum(1))
    values, vectors = np.linalg.eigh(matrix)
    second = np.argsort(-np.abs(values))[1]
    start = torch.from_numpy(vectors[:, second]).float()
    weights = [{"w": torch.stack([start[branch], torch.tensor(3.0)])} for branch in range(branches)]
    mean, spread = torch.stack([each["w"] for each in weights]).mean(0), spread_of(weights)
    for _ in range(rounds):
        weights = gossip_round(weights, rows)
    assert torch.stack([each["w"] for each in weights]).mean(0).sub(mean).abs().max() < 1e-6
    assert (spread_of(weights) / spread) ** (1 / rounds) == pytest.approx(abs(values[second]), rel=0.01)

    random = [drawn(seed) | {"w": drawn(seed)["matrix"]} for seed in range(branches)]
    before, mean = spread_of(random), torch.stack([each["w"] for each in random]).mean(0)
    random = gossip_round(random, rows)
    assert torch.stack([each["w"] for each in random]).mean(0).sub(mean).abs().max() < 1e-6
    assert spread_of(random) <= abs(values[second]) * before * 1.000001


def test_random_pairs_keep_the_mean_and_agree_in_the_end() -> None:
    branches = 8
    weights = [{"w": drawn(seed)["matrix"]} for seed in range(branches)]
    mean, before = torch.stack([each["w"] for each in weights]).mean(0), spread_of(weights)
    for number in range(1, 31):
        weights = gossip_round(
            weights, metropolis_weights(edges_of("random_pairs", branches, 7, number), branches)
        )
    assert torch.stack([each["w"] for each in weights]).mean(0).sub(mean).abs().max() < 1e-6
    assert spread_of(weights) < 1e-3 * before


def test_a_branch_without_neighbours_keeps_its_weights() -> None:
    own = drawn(0)
    assert mix(own, [], []) == own


def test_late_contributions_count_less() -> None:
    on_time, late = (Contribution(BranchRun(number, 0), 6.0, "digest") for number in (5, 3))
    assert [age_scale(age) for age in (0, 1, 2)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert coefficients(LocalSpec(branches=2), [late, on_time], 5) == pytest.approx([0.25, 0.75])
    elastic = ElasticSpec(branches=2, rate=0.3)
    assert coefficients(elastic, [late, on_time], 5) == pytest.approx([0.1, 0.3])
    pushes = ParameterServerSpec(branches=2, staleness=4)
    assert coefficients(pushes, [late, on_time], 5) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bias": torch.full((5,), float("nan"))}, "bias is not finite"),
        ({"bias": torch.full((5,), float("inf"))}, "bias is not finite"),
        ({"bias": torch.zeros(6)}, r"bias is torch.float32 \[6\], not float32 \[5\]"),
        ({"bias": torch.zeros(5, dtype=torch.float64)}, "bias is torch.float64"),
        ({"other": torch.zeros(5)}, "only one of it and the weights has other"),
    ],
)
def test_damaged_contributions_are_refused(change: Tensors, problem: str) -> None:
    weights, run = drawn(0), BranchRun(4, 2)
    damaged = drawn(1) | change
    with pytest.raises(VerificationFailed, match=f"branch 2 to round 4 is damaged: {problem}"):
        require_fitting(damaged, weights, run)
    record = MergeRecord(4, (MergeTerm(Contribution(run, 1.0, "digest"), 1.0),))
    with pytest.raises(VerificationFailed, match=problem):
        apply_merge(record, {run: damaged}, OuterSgdSpec(), weights, {})


def test_a_missing_contribution_is_named() -> None:
    with pytest.raises(VerificationFailed, match="branch 1 to round 3 is missing"):
        apply_merge(a_record(3, {1: 1.0}), {}, OuterSgdSpec(), drawn(0), {})


def test_presets_have_the_outer_optimizers_of_the_papers() -> None:
    diloco = LocalSpec(branches=2, preset="diloco")
    assert diloco.outer == OuterNesterovSpec(learning_rate=0.7, momentum=0.9)
    assert LocalSpec(branches=2, preset="sparse_loco").outer == OuterSgdSpec(learning_rate=1.0)
