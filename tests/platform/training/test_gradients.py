"""Gradients in buckets, added in the order of the tree, have the bits of one process that adds them all."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from share_compute.protocol.tree import Node, SummationTree
from share_compute.specification import FusionSpec
from share_compute.training.gradients import GradientBuckets, clip_factor

FUSION = FusionSpec(mode="size", bucket_bytes=200)


class Tied(nn.Module):
    """Embedding and head are one parameter, as in small language models; one parameter gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))  # type: ignore[no-any-return]


def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def backward(module: nn.Module, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(microbatch)
    tokens = torch.randint(0, 7, (3,), generator=generator)
    loss = nn.functional.cross_entropy(module(tokens), tokens.roll(1)) * 10.0 ** (microbatch % 5)
    loss.backward()  # type: ignore[no-untyped-call]


def alone(tree: SummationTree, node: Node) -> dict[str, Tensor]:
    """Return the sum by the tree, evaluated with plain torch."""
    children = tree.children(node)
    if children is None:
        module = model()
        backward(module, node.start)
        return {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad + 0.0
            for name, parameter in module.named_parameters()
        }
    left, right = (alone(tree, child) for child in children)
    return {name: left[name] + right[name] for name in left}


def compute(
    buckets: GradientBuckets, module: nn.Module, microbatches: Sequence[int]
) -> dict[int, list[Tensor]]:
    """Run these backwards; return the parts of each bucket as they were when it was complete."""
    complete: dict[int, list[Tensor]] = {}
    for place, microbatch in enumerate(microbatches, start=1):
        buckets.begin(microbatch)
        if place == len(microbatches):
            buckets.watch(lambda bucket: complete.update({bucket: buckets.parts(bucket)}))
        backward(module, microbatch)
        buckets.finish()
    return complete


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None
    }


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.int32), other[name].view(torch.int32)), name


@st.composite
def work(draw: st.DrawFn) -> tuple[SummationTree, list[list[int]]]:
    """Return a tree, and which microbatches each of some members computes, in which order."""
    tree = SummationTree(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))))
    order = draw(st.permutations(range(tree.microbatches)))
    members = draw(st.integers(1, 3))
    owners = draw(st.lists(st.integers(0, members - 1), min_size=len(order), max_size=len(order)))
    return tree, [
        [each for each, owner in zip(order, owners, strict=True) if owner == member]
        for member in range(members)
    ]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(work())
def test_members_hold_the_largest_sums_in_the_bits_of_one_process(
    case: tuple[SummationTree, list[list[int]]],
) -> None:
    tree, shares = case
    for own in shares:
        module = model()
        buckets = GradientBuckets(dict(module.named_parameters()), tree, FUSION)
        complete = compute(buckets, module, own)
        assert buckets.held == tree.cover(own)
        assert list(complete) == (list(range(len(buckets))) if own else [])
        assert len(buckets) > 1
        for place, node in enumerate(buckets.held):
            reference = model()
            expected = GradientBuckets(dict(reference.named_parameters()), tree, FUSION)
            expected.settle()
            for name, parameter in reference.named_parameters():
                assert parameter.grad is not None
                parameter.grad.copy_(alone(tree, node)[name])
            for bucket in range(len(buckets)):
                part = complete[bucket][place]
                assert torch.equal(part.view(torch.int32), expected.result(bucket).view(torch.int32))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(work())
def test_a_member_alone_ends_with_the_whole_sum(case: tuple[SummationTree, list[list[int]]]) -> None:
    tree, shares = case
    module = model()
    buckets = GradientBuckets(dict(module.named_parameters()), tree, FUSION)
    wanted = alone(tree, tree.root)
    for _ in range(2):  # the second time in buffers that were used before
        compute(buckets, module, [microbatch for own in shares for microbatch in own])
        buckets.settle()
        assert_same_bits(gradients(module), wanted)
        buckets.reset()
        assert buckets.held == ()


def test_who_holds_nothing_gets_the_sum() -> None:
    tree = SummationTree((1, 1))
    giver, taker = model(), model()
    gives = GradientBuckets(dict(giver.named_parameters()), tree, FUSION)
    takes = GradientBuckets(dict(taker.named_parameters()), tree, FUSION)
    compute(gives, giver, [0, 1])
    started: list[int] = []
    takes.watch(started.append)
    takes.finish()  # no microbatch is left: all buckets are ready
    assert started == list(range(len(takes)))
    for bucket in started:
        assert takes.parts(bucket) == []
        takes.result(bucket).copy_(gives.result(bucket))
    gives.settle()
    takes.settle()
    assert takes.held == (tree.root,)
    assert_same_bits(gradients(taker), gradients(giver))
    assert takes.digest() == gives.digest()
    takes.result(0)[0] += 1
    assert takes.digest() != gives.digest()


def test_a_microbatch_counts_once() -> None:
    module = model()
    buckets = GradientBuckets(dict(module.named_parameters()), SummationTree((2, 2)))
    compute(buckets, module, [0, 1])
    with pytest.raises(ValueError, match="held already"):
        buckets.begin(1)
    with pytest.raises(ValueError, match="not complete"):
        buckets.squared_norms()


def test_norms_and_scale_are_those_of_torch() -> None:
    tree = SummationTree((2,))
    module, large = model(), nn.Linear(300, 50)
    names = {**dict(module.named_parameters()), "large": large.weight}
    buckets = GradientBuckets(names, tree, FUSION)
    compute(buckets, module, [0])
    buckets.begin(1)
    large(torch.rand(4, 300)).square().sum().backward()
    backward(module, 1)
    buckets.finish()
    squares = buckets.squared_norms()
    assert list(squares) == sorted(names)
    for name, parameter in names.items():
        assert parameter.grad is not None
        assert squares[name] == pytest.approx(float(parameter.grad.double().square().sum()), rel=1e-6)
    norm = math.sqrt(sum(squares.values()))
    copies = [nn.Parameter(torch.zeros_like(parameter)) for parameter in names.values()]
    for copy, parameter in zip(copies, names.values(), strict=True):
        assert parameter.grad is not None
        copy.grad = parameter.grad.clone()
    assert norm == pytest.approx(float(clip_grad_norm_(copies, 0.1)), rel=1e-6)
    buckets.scale(clip_factor(norm, 0.1))
    for copy, parameter in zip(copies, names.values(), strict=True):
        assert torch.allclose(copy.grad, parameter.grad, rtol=1e-5)  # type: ignore[arg-type]


def test_norms_do_not_depend_on_what_else_the_shard_has() -> None:
    tree = SummationTree((1,))
    found = []
    for extra in range(8):
        torch.manual_seed(1)
        linear = nn.Linear(123, 77)
        other = nn.Parameter(torch.ones(extra + 1))
        buckets = GradientBuckets({"linear": linear.weight, "other": other}, tree)
        buckets.begin(0)
        linear(torch.rand(5, 123)).square().sum().backward()
        buckets.finish()
        found.append(buckets.squared_norms()["linear"])
    assert len(set(found)) == 1


def test_buffers_are_used_again_and_no_more_than_a_step_needs() -> None:
    tree = SummationTree((1, 1, 1, 1))
    module = model()
    buckets = GradientBuckets(dict(module.named_parameters()), tree)

    def addresses(microbatches: Sequence[int]) -> set[int]:
        complete = compute(buckets, module, microbatches)
        found = {part.data_ptr() for part in complete[0]}
        buckets.reset()
        return found

    scattered = addresses([0, 2])
    assert len(scattered) == 2
    assert addresses([2, 0]) == scattered
    assert addresses([3]) < scattered  # and the other one is released
    compute(buckets, module, [0])
    spoilt = buckets.parts(0)[0]
    spoilt.fill_(torch.nan)
    buckets.spoil()
    assert buckets.held == ()
    compute(buckets, module, [0])
    assert buckets.parts(0)[0].data_ptr() != spoilt.data_ptr()


@pytest.mark.parametrize(
    ("fusion", "sizes"),
    [
        (FusionSpec(), [4 * 22]),
        (FusionSpec(mode="size", bucket_bytes=24), [4 * 4, 4 * 16, 4 * 2]),
        (FusionSpec(mode="size", bucket_bytes=1), [4 * 4, 4 * 16, 4 * 2]),
        (FusionSpec(mode="index", cuts=(2,)), [4 * 20, 4 * 2]),
        (FusionSpec(mode="index", cuts=(1, 2, 9)), [4 * 4, 4 * 16, 4 * 2]),
    ],
)
def test_fusion_says_where_buckets_end(fusion: FusionSpec, sizes: list[int]) -> None:
    parameters = {
        "first": nn.Parameter(torch.ones(2)),
        "frozen": nn.Parameter(torch.ones(5), requires_grad=False),
        "middle": nn.Parameter(torch.ones(4, 4)),
        "last": nn.Parameter(torch.ones(4)),
    }
    assert GradientBuckets(parameters, SummationTree((1,)), fusion).bucket_bytes == sizes


def test_large_gradients_are_cut_so_that_sums_hide_behind_the_backward() -> None:
    parameters = {str(place): nn.Parameter(torch.empty(2**20, device="meta")) for place in range(64)}
    sizes = GradientBuckets(parameters, SummationTree((1,))).bucket_bytes
    assert sizes == [32 * 2**20] * 8


def test_a_bucket_has_one_type() -> None:
    parameters = {
        "half": nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
        "single": nn.Parameter(torch.ones(4)),
    }
    buckets = GradientBuckets(parameters, SummationTree((1,)))
    buckets.begin(0)
    (parameters["half"].float() * parameters["single"]).sum().backward()
    buckets.finish()
    assert buckets.bucket_bytes == [16, 8]
    assert buckets.squared_norms() == {"half": 4.0, "single": 4.0}
    assert len(buckets.digest()) == 32
