"""Branches that train apart: contributions and updates, for all codecs, against plain computations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.platform.compression.codecs import SPECS
from torch import Tensor

from share_compute.compression.codec import ErrorFeedback
from share_compute.compression.factory import codec_of_round, codec_of_update
from share_compute.compression.quantization import FloatCodec
from share_compute.errors import VerificationFailed
from share_compute.specification import TrainingSpec
from share_compute.specification.synchronization import LocalSpec
from share_compute.synchronization.branch import BranchState, is_branch_slot

SHAPES = {"matrix": (24, 33), "bias": (24,), "scalar": ()}
CODECS = [*SPECS, "int8 without feedback", "int4 from step 4"]


def settings(codec: str = "none", **options: Any) -> TrainingSpec:
    """Return the settings of a job whose two branches take two steps in a round."""
    name, _, addition = codec.partition(" ")
    compression = dict(SPECS[name])
    if addition:
        compression |= {"error_feedback": None} if "without" in addition else {"from_step": 4}
    return TrainingSpec.model_validate(
        {
            "synchronization": {"kind": "local", "branches": 2, "every": 2},
            "compression": compression,
            **options,
        }
    )


def drawn(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=source) for name, shape in SHAPES.items()}


def train(branch: BranchState, weights: dict[str, Tensor], seed: int) -> None:
    """Change weights as training does."""
    for name, change in drawn(seed, 0.1).items():
        weights[name] += change
    branch.forget_contribution()


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def update_of(training: TrainingSpec, version: int) -> dict[str, Tensor]:
    """Return the payloads of an update that follows from its version alone."""
    codec = codec_of_update(training, version)
    return {
        name: codec.encode(change, codec.begin(name, change.shape))[0]
        for name, change in drawn(100 + version, 0.1).items()
    }


@pytest.mark.parametrize("codec", CODECS)
def test_branches_and_merges_by_hand_are_plain_computations(codec: str) -> None:
    training = settings(codec)
    common = drawn(0)
    codecs = {number: codec_of_round(training, number) for number in (1, 2, 3)}
    starting = codec_of_round(training, 100)
    states = [
        {name: starting.begin(name, shape) for name, shape in SHAPES.items()}
        for _ in ("branch 0", "branch 1", "server")
    ]
    weights = [copied(common), copied(common)]
    branches = [BranchState(training, each, 0) for each in weights]
    for version in (1, 2, 3):
        one, both = codecs[version], codec_of_update(training, version)
        for number, branch in enumerate(branches):
            train(branch, weights[number], 10 * version + number)
        given = [branch.contribution() for branch in branches]
        update: dict[str, Tensor] = {}
        for name, shape in SHAPES.items():
            means = []
            for number in (0, 1):
                change = weights[number][name] - common[name]
                payload, states[number][name] = one.encode(change, states[number][name])
                assert torch.equal(given[number][name], payload)
                means.append(one.decode(payload, shape))
            update[name], states[2][name] = both.encode((means[0] + means[1]) / 2, states[2][name])
            common[name] = common[name] + both.decode(update[name], shape)
        for number, branch in enumerate(branches):
            assert branch.merge(version, version - 1, update, closes_round=True) == tuple(SHAPES)
            assert branch.version == version
            assert same(weights[number], common)
            for name in SHAPES:
                for slot, tensor in states[number][name].items():
                    assert torch.equal(branch.tensors()[f"{name}::branch.{slot}"], tensor)


@pytest.mark.parametrize("codec", CODECS)
def test_repeated_contributions_are_equal_also_after_a_load(codec: str) -> None:
    training, weights = settings(codec), drawn(0)
    branch = BranchState(training, weights, 0)
    for version in (1, 2):
        train(branch, weights, version)
        before = copied(branch.tensors())
        first, second = branch.contribution(), branch.contribution()
        assert same(first, second)
        assert same(branch.tensors(), before)
        elsewhere = copied(weights)
        loaded = BranchState(training, elsewhere, 7)
        loaded.restore(before)
        assert same(loaded.tensors(), before)
        assert same(loaded.contribution(), first)
        update = update_of(training, version)
        for one in (branch, loaded):
            one.merge(version, version - 1, update, closes_round=True)
        assert same(branch.tensors(), loaded.tensors())
        assert same(weights, elsewhere)


@pytest.mark.parametrize("codec", ["none", "int4", "powersgd"])
@given(merged=st.sets(st.sampled_from(list(SHAPES))), has_given=st.booleans())
def test_a_repeated_merge_changes_only_parameters_that_lack_it(
    codec: str, merged: set[str], has_given: bool
) -> None:
    training, weights = settings(codec), drawn(0)
    branch = BranchState(training, weights, 4)
    train(branch, weights, 1)
    before, weights_before = copied(branch.tensors()), copied(weights)
    branch.contribution()
    update = update_of(training, 5)
    branch.merge(5, 4, update, closes_round=True)
    after = copied(branch.tensors())
    assert branch.merge(5, 4, {}, closes_round=True) == ()
    assert same(branch.tensors(), after)

    # A member loads some parameters from a member that has merged, and the rest from another one.
    mixed = {name: (weights if name in merged else weights_before)[name].clone() for name in SHAPES}
    loaded = BranchState(training, mixed, 0)
    loaded.restore({name: (after if name.partition("::")[0] in merged else before)[name] for name in before})
    lacking = SHAPES.keys() - merged
    assert loaded.version == (4 if lacking else 5)
    if has_given and not merged:
        loaded.contribution()
    assert loaded.update_bytes(5, 4).keys() == lacking
    assert set(loaded.merge(5, 4, update, closes_round=True)) == lacking
    assert same(loaded.tensors(), after)
    assert same(mixed, weights)


def test_a_branch_with_parameters_of_two_versions_has_no_contribution() -> None:
    training, weights = settings(), drawn(0)
    branch = BranchState(training, weights, 0)
    other = BranchState(training, copied(weights), 1)
    branch.restore({name: each for name, each in other.tensors().items() if name.startswith("bias")})
    with pytest.raises(VerificationFailed, match="different versions, 0 to 1"):
        branch.contribution()


@pytest.mark.parametrize("codec", CODECS)
def test_a_late_branch_applies_later_updates_and_keeps_the_state_of_its_own_round(codec: str) -> None:
    training = settings(codec)
    prompt, late = drawn(0), drawn(0)
    on_time, behind = BranchState(training, prompt, 0), BranchState(training, late, 0)
    for version in (1, 2, 3):
        train(on_time, prompt, version)
        on_time.merge(version, version - 1, update_of(training, version), closes_round=True)
    train(behind, late, 9)
    change = {name: late[name] - drawn(0)[name] for name in SHAPES}
    behind.contribution()
    for version in (1, 2, 3):
        behind.merge(version, version - 1, update_of(training, version), closes_round=version == 1)
    assert behind.version == 3
    assert same(prompt, late)
    one = codec_of_round(training, 1)
    for name, tensor in change.items():
        begun = codec_of_round(training, 100).begin(name, tensor.shape)
        for slot, value in one.encode(tensor, begun)[1].items():
            assert torch.equal(behind.tensors()[f"{name}::branch.{slot}"], value)


def test_an_update_after_a_missing_one_is_refused_and_changes_nothing() -> None:
    training, weights = settings(), drawn(0)
    branch = BranchState(training, weights, 2)
    before = copied(branch.tensors()), copied(weights)
    with pytest.raises(
        VerificationFailed,
        match=r"matrix is of version 2, so the update from version 3 to 4 cannot be applied",
    ):
        branch.merge(4, 3, update_of(training, 4), closes_round=True)
    assert branch.merge(1, 0, {}, closes_round=True) == ()
    assert same(branch.tensors(), before[0])
    assert same(weights, before[1])


def lack(update: dict[str, Tensor]) -> None:
    del update["bias"]


def shorten(update: dict[str, Tensor]) -> None:
    update["bias"] = update["bias"][:-1]


def lengthen(update: dict[str, Tensor]) -> None:
    update["bias"] = torch.cat((update["bias"], update["bias"]))


def retype(update: dict[str, Tensor]) -> None:
    update["bias"] = update["bias"].float()


@pytest.mark.parametrize("spoil", [lack, shorten, lengthen, retype])
def test_a_wrong_payload_is_refused_before_anything_changes(
    spoil: Callable[[dict[str, Tensor]], None],
) -> None:
    training, weights = settings("int8"), drawn(0)
    branch = BranchState(training, weights, 0)
    update = update_of(training, 1)
    spoil(update)
    before = copied(branch.tensors())
    with pytest.raises(VerificationFailed, match=r"bias|bytes"):
        branch.merge(1, 0, update, closes_round=True)
    assert same(branch.tensors(), before)
    assert same(weights, drawn(0))


def test_without_tensors_a_branch_keeps_the_state_that_it_began_with() -> None:
    weights = drawn(0)
    branch = BranchState(settings("int8"), weights, 3)
    branch.restore({})
    assert branch.version == 3
    assert all(
        torch.equal(branch.tensors()[f"{name}::branch.base"], value) for name, value in weights.items()
    )
    assert all(map(is_branch_slot, branch.tensors()))
    assert BranchState(settings(), {}, 3).version is None


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("bias::branch.base", None),
        ("bias::branch.residual", None),
        ("bias::branch.residual", torch.zeros(25)),
        ("matrix::branch.residual", torch.zeros(2, 2)),
        ("bias::branch.right", torch.zeros(3)),
        ("other::branch.base", torch.zeros(3)),
        ("bias::branch.base", torch.zeros(25)),
        ("bias::branch.version", torch.tensor(0.5)),
        ("bias::branch.version", torch.tensor(-1.0)),
    ],
)
def test_a_state_that_does_not_fit_is_refused(name: str, tensor: Tensor | None) -> None:
    branch = BranchState(settings("int8"), drawn(0), 0)
    tensors = copied(branch.tensors())
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(VerificationFailed, match=f"does not fit the job: {name}"):
        branch.restore(tensors)


def test_a_branch_keeps_no_view_of_the_tensors_that_it_is_given() -> None:
    weights = drawn(0)
    branch = BranchState(settings("int8"), weights, 0)
    tensors = copied(branch.tensors())
    branch.restore(tensors)
    for tensor in (*weights.values(), *tensors.values()):
        tensor.fill_(7.0)
    assert torch.equal(branch.tensors()["bias::branch.base"], drawn(0)["bias"])


def test_rounds_that_end_before_the_first_compressed_step_are_not_compressed() -> None:
    training = settings("int8 from step 4")
    assert codec_of_round(training, 1) == FloatCodec()
    assert isinstance(codec_of_round(training, 2), ErrorFeedback)
    assert codec_of_round(settings(), 1) == FloatCodec()


def test_payloads_are_decoded_without_the_seed_of_the_branch_that_made_them() -> None:
    change = drawn(0)["matrix"]
    one, other = (codec_of_round(settings("powersgd", seed=seed), 1) for seed in (1, 2))
    payload, _ = one.encode(change, one.begin("matrix", change.shape))
    assert torch.equal(one.decode(payload, change.shape), other.decode(payload, change.shape))


def test_the_memory_of_a_branch_counts_its_base_and_its_residual() -> None:
    plain = TrainingSpec()
    assert (plain.branch_tensors, plain.state_tensors) == (0, 2)
    for codec, expected in (("none", 1), ("int8", 2), ("int8 without feedback", 1), ("topk", 2)):
        assert settings(codec).branch_tensors == expected
        kept = BranchState(settings(codec), {"matrix": torch.zeros(24, 33)}, 0).tensors()
        assert sum(each.numel() == 24 * 33 for each in kept.values()) == expected


# -- overlap and fragments -------------------------------------------------------------------------------------------


def overlapping(codec: str) -> TrainingSpec:
    policy = {"kind": "local", "branches": 2, "every": 2, "overlap": 1}
    return settings(codec, synchronization=policy)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("loads", ["never", "before the merge"])
def test_what_a_branch_learns_during_a_merge_is_added_to_the_common_weights(codec: str, loads: str) -> None:
    training, weights = overlapping(codec), drawn(0)
    branch, common = BranchState(training, weights, 0), drawn(0)
    for version in (1, 2, 3):
        train(branch, weights, version)
        given = branch.contribution()
        branch.end_round(version - 1)
        branch.end_round(version - 1)
        at_end = copied(weights)
        train(branch, weights, 50 + version)
        assert same(branch.contribution(), given)  # a coordinator that replaced another one asks again
        if loads == "before the merge":
            tensors, weights = copied(branch.tensors()), copied(weights)
            branch = BranchState(training, weights, 9)
            branch.restore(tensors)
            assert same(branch.contribution(), given)
        learned = {name: weights[name] - at_end[name] for name in SHAPES}
        update = update_of(training, version)
        decode = codec_of_update(training, version).decode
        common = {name: value + decode(update[name], value.shape) for name, value in common.items()}
        branch.merge(version, version - 1, update, closes_round=True)
        assert same(weights, {name: common[name] + learned[name] for name in SHAPES})
        branch.end_round(version - 1)  # the member has merged, so this has no effect
        assert branch.merge(version, version - 1, {}, closes_round=True) == ()


def test_a_round_merges_only_its_fragment_and_the_last_one_merges_all() -> None:
    policy = LocalSpec(branches=2, every=2, fragments=2)
    names = ["model.embed.weight", "model.layers.0.q", "model.layers.1.q", "model.layers.2.q"]
    rounds = [[name for name in names if policy.merges(name, number, 3)] for number in (1, 2, 3)]
    assert rounds == [[names[0], names[1], names[3]], [names[2]], names]


def test_changes_of_other_fragments_are_kept_until_they_are_merged() -> None:
    training = settings(synchronization={"kind": "local", "branches": 2, "every": 2, "fragments": 2}, steps=6)
    shape = (3, 5)
    weights = {f"layers.{number}": torch.zeros(shape) for number in (0, 1)}
    branch = BranchState(training, weights, 0)
    for version, merged in ((1, ["layers.0"]), (2, ["layers.1"]), (3, ["layers.0", "layers.1"])):
        before = {name: value.add_(1.0).clone() for name, value in weights.items()}
        branch.forget_contribution()
        given = branch.contribution()
        assert sorted(given) == merged
        assert sorted(branch.update_bytes(version, version - 1)) == merged
        codec = codec_of_update(training, version)
        update = {name: codec.encode(torch.full(shape, 0.25), {})[0] for name in merged}
        assert branch.merge(version, version - 1, update, closes_round=True) == tuple(merged)
        for name, value in weights.items():
            if name in merged:
                assert not torch.equal(value, before[name])
            else:
                assert torch.equal(value, before[name])
    assert weights["layers.0"][0, 0] == 0.5  # merged twice
    assert weights["layers.1"][0, 0] == 0.5
