"""PowerSGD: matrices of low rank arrive whole, others as projections that improve from call to call."""

from __future__ import annotations

import pytest
import torch
from tests.platform.compression.codecs import drawn, encoded
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from share_compute.compression.low_rank import PowerSgdCodec


def relative_error(matrix: torch.Tensor, decoded: torch.Tensor) -> float:
    return float((matrix - decoded).norm() / matrix.norm())


@pytest.mark.parametrize("rank", [1, 2, 4, 8])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_a_matrix_of_low_rank_is_exact(rank: int, scale: float) -> None:
    matrix = drawn(120, rank, seed=1) @ drawn(rank, 90, seed=2) * scale
    for more in (0, 1, 3):
        one = PowerSgdCodec(rank + more)
        assert relative_error(matrix, one.decode(encoded(one, matrix), (120, 90))) < 1e-5


def test_columns_of_different_lengths_are_orthogonal() -> None:
    matrix = drawn(200, 6) * 10.0 ** torch.arange(0, -6, -1) @ drawn(6, 150, seed=1)
    one = PowerSgdCodec(6)
    left = encoded(one, matrix)[: 6 * 200 * 4].view(torch.float32).view(6, 200).double()
    left /= left.norm(dim=1, keepdim=True)
    assert float((left @ left.T - torch.eye(6)).abs().amax()) < 1e-6


@pytest.mark.exact
def test_bits_do_not_depend_on_the_order_of_additions() -> None:
    """All sums of products are exact, so rows of P and Q may be exchanged, and tensors may begin anywhere in memory."""
    one = PowerSgdCodec(4)
    matrix = drawn(700, 90)
    payload, state = one.encode(matrix, one.begin("weight", (700, 90)))
    place = torch.empty(700 * 90 + 1)[1:].view(700, 90).copy_(matrix)
    moved = {"right": torch.empty(4 * 90 + 3)[3:].view(4, 90).copy_(one.begin("weight", (700, 90))["right"])}
    again, state_again = one.encode(place, moved)
    assert torch.equal(payload, again)
    assert torch.equal(state["right"], state_again["right"])
    left, right = (part.view(4, -1) for part in payload.view(torch.float32).split([4 * 700, 4 * 90]))
    exchanged = torch.cat((left.flip(0).reshape(-1), right.flip(0).reshape(-1))).view(torch.uint8)
    assert torch.equal(one.decode(payload, (700, 90)), one.decode(exchanged, (700, 90)))


def test_it_finds_the_largest_singular_vectors() -> None:
    matrix = drawn(80, 60)
    one = PowerSgdCodec(3)
    state = one.begin("weight", (80, 60))
    errors = []
    for _ in range(100):
        payload, state = one.encode(matrix, state)
        errors.append(relative_error(matrix, one.decode(payload, (80, 60))))
    values = torch.linalg.svdvals(matrix)
    assert errors[-1] == pytest.approx(float(values[3:].norm() / values.norm()), rel=1e-3)
    assert errors[0] > errors[4] > errors[-1]


def test_a_zero_matrix_loses_nothing_for_later() -> None:
    one = PowerSgdCodec(2)
    begin = one.begin("weight", (40, 30))
    payload, state = one.encode(torch.zeros(40, 30), begin)
    assert not one.decode(payload, (40, 30)).any()
    assert torch.equal(state["right"], begin["right"])
    narrow = drawn(40, 1) @ drawn(1, 30, seed=1)
    _, state = one.encode(narrow, state)
    wide = drawn(40, 2, seed=2) @ drawn(2, 30, seed=3)
    payload, _ = one.encode(wide, state)
    assert relative_error(wide, one.decode(payload, (40, 30))) < 1e-4


def test_the_first_vectors_depend_on_seed_and_name() -> None:
    first = [
        PowerSgdCodec(2, seed).begin(name, (40, 30))["right"]
        for seed, name in ((0, "a"), (1, "a"), (0, "b"), (0, "a"))
    ]
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


@pytest.mark.parametrize(
    "shape", [(256, 256), (688, 256), (8192, 256), (256,), (16, 3, 3, 3), (64, 32, 3, 3), (7, 7), (1, 9)]
)
@pytest.mark.parametrize("rank", [1, 4, 32])
def test_sizes_are_those_of_the_hook_of_torch(shape: tuple[int, ...], rank: int) -> None:
    matrix = torch.zeros(shape).view(shape[0], -1)
    least = min(*matrix.shape, rank)
    compresses, before, after = powerSGD_hook._should_compress(*matrix.shape, least, 2)  # noqa: SLF001
    assert PowerSgdCodec(rank).num_bytes(shape) == 4 * (after if compresses else before)
