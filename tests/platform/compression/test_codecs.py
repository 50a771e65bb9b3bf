"""Properties of all codecs: errors are bounded, sizes are known, damage is found, and bits repeat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.platform.compression.codecs import EXACT, SPECS, codec, drawn, encoded, spec_of, tensors
from torch import Tensor

from share_compute.compression.checks import LARGEST
from share_compute.compression.codec import RESIDUAL
from share_compute.compression.factory import codec_of
from share_compute.compression.rows import SLAB
from share_compute.errors import UserError, VerificationFailed

SEVERAL = settings(max_examples=60, deadline=None, derandomize=True)
NAMES = st.sampled_from(list(SPECS))


def squares(values: Tensor) -> float:
    return float(values.double().square().sum())


def rows_of(name: str, tensor: Tensor) -> Iterator[Tensor]:
    return (row for row in tensor.float().reshape(-1).split(SPECS[name].get("chunk", 256)) if len(row))


def largest_error(name: str, row: Tensor) -> Tensor:
    """Return the bound of each value's error in a row."""
    if name == "none":
        return torch.zeros_like(row)
    if name == "bf16":
        return row.abs() * 2**-8 + 2.0**-134
    levels = {"int8": 127, "int4": 7}[name]
    # The scale is rounded up to bfloat16, and the division rounds as well.
    return (row.abs().amax() / levels / 2 * (1 + 2**-7) * (1 + 1e-6) + 1e-38).expand_as(row)


@SEVERAL
@given(tensors(), st.sampled_from(["none", "bf16", "int8", "int4"]))
def test_the_error_of_each_value_is_bounded(tensor: Tensor, name: str) -> None:
    one = codec(name)
    decoded = one.decode(encoded(one, tensor), tensor.shape)
    for row, found in zip(rows_of(name, tensor), rows_of(name, decoded), strict=True):
        assert bool(((row - found).abs() <= largest_error(name, row)).all())


@SEVERAL
@given(tensors(), NAMES)
def test_the_sum_of_squared_errors_is_at_most_the_sum_of_squares(tensor: Tensor, name: str) -> None:
    """This makes error feedback converge: a codec with this property is a contraction."""
    one = codec(name)
    decoded = one.decode(encoded(one, tensor), tensor.shape)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == torch.float32
    if name == "powersgd":
        assert squares(tensor.float() - decoded) <= squares(tensor) * (1 + 1e-5)
        return
    for row, found in zip(rows_of(name, tensor), rows_of(name, decoded), strict=True):
        tiny = len(row) * 1e-76
        assert squares(row - found) <= squares(row) * (1 + 1e-6) + tiny
        if name == "sign":
            mean = float(row.double().abs().mean())
            assert squares(row - found) <= squares(row) - len(row) * mean**2 * (1 - 2**-14) + tiny


@SEVERAL
@given(tensors())
def test_the_largest_values_are_sent_as_they_are(tensor: Tensor) -> None:
    one = codec("topk")
    decoded = one.decode(encoded(one, tensor), tensor.shape)
    for row, found in zip(rows_of("topk", tensor), rows_of("topk", decoded), strict=True):
        sent = found != 0
        kept = max(1, round(0.1 * len(row)))
        assert torch.equal(found[sent], row[sent])
        assert int(sent.sum()) == min(kept, int((row != 0).sum()))
        assert (
            float(row[~sent].abs().amax()) <= float(row[sent].abs().amin())
            if 0 < sent.sum() < len(row)
            else True
        )


@pytest.mark.parametrize("name", [name for name in SPECS if name != "powersgd"])
def test_rows_do_not_depend_on_their_tensor(name: str) -> None:
    """A tensor is encoded in several slabs; each row decodes as it does alone."""
    one = codec(name)
    length = SPECS[name].get("chunk", 256)
    tensor = drawn(2 * SLAB + 3 * length + 5)
    decoded = one.decode(encoded(one, tensor), tensor.shape)
    last = len(tensor) // length
    for row in (0, SLAB // length - 1, SLAB // length, last - 1, last):
        alone = tensor[row * length : (row + 1) * length]
        found = decoded[row * length : (row + 1) * length]
        assert torch.equal(one.decode(encoded(one, alone), alone.shape), found)


def test_of_equal_values_the_first_ones_are_sent() -> None:
    one = codec_of(spec_of(name="topk", density=0.5, chunk=8, error_feedback=None), 0)
    tensor = torch.tensor([1.0, -1, 2, 1, 1, 1, 1, 3, 0, 0, 0, 0, 0, 0, 0, 0])
    assert one.decode(encoded(one, tensor), (16,)).tolist() == [1, -1, 2, 0, 0, 0, 0, 3] + [0] * 8
    assert encoded(one, torch.zeros(16))[:3].tolist() == [
        0b10_001_000,
        0b1000_011_0,
        0b01101000,
    ]  # indices 0 to 3, of 3 bits, twice


@SEVERAL
@given(tensors(), NAMES, st.sampled_from([0.95, 1.0]), st.integers(0, 2**32))
def test_nothing_is_lost_but_what_is_in_the_residual(
    tensor: Tensor, name: str, decay: float, seed: int
) -> None:
    """Decoded and next residual are decay * residual + input: bit-equal, or to half an ulp of the residual."""
    one = codec(name, feedback=decay)
    state = dict(one.begin("weight", tensor.shape))
    if name == "none":
        assert state == {}
        return
    source = torch.Generator().manual_seed(seed)
    scale = tensor.float().abs().amax() if tensor.numel() else 1
    state[RESIDUAL] = torch.randn(tensor.shape, generator=source) * scale
    total = state[RESIDUAL] * decay + tensor.float()
    payload, following = one.encode(tensor, state)
    decoded, residual = one.decode(payload, tensor.shape), following[RESIDUAL]
    if name in EXACT:
        assert torch.equal(decoded + residual, total)
    difference = (decoded.double() + residual.double() - total.double()).abs()
    assert bool((difference <= residual.double().abs() * 2**-24 + 2.0**-150).all())


@SEVERAL
@given(st.lists(st.integers(0, 300), max_size=3), NAMES)
def test_sizes_are_known_from_the_shape(shape: list[int], name: str) -> None:
    one = codec(name, feedback=1.0)
    tensor = drawn(*shape) if shape else torch.tensor(0.5)
    payload = encoded(one, tensor)
    assert (payload.dtype, payload.shape) == (torch.uint8, (one.num_bytes(shape),))
    assert payload.is_contiguous()


@SEVERAL
@given(
    tensors(),
    NAMES,
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=20),
)
def test_damaged_bytes_are_refused_or_finite(tensor: Tensor, name: str, flips: list[tuple[int, int]]) -> None:
    one = codec(name)
    payload = encoded(one, tensor)
    for place, mask in flips if len(payload) else ():
        payload[place % len(payload)] ^= mask
    try:
        decoded = one.decode(payload, tensor.shape)
    except VerificationFailed:
        return
    assert decoded.shape == tensor.shape
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
def test_payloads_of_one_byte_are_refused_or_finite(name: str, byte: int) -> None:
    one = codec(name)
    payload = torch.full((one.num_bytes((60, 50)),), byte, dtype=torch.uint8)
    try:
        decoded = one.decode(payload, (60, 50))
    except VerificationFailed:
        return
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("name", SPECS)
def test_other_lengths_and_types_are_refused(name: str) -> None:
    one = codec(name)
    payload = encoded(one, drawn(60, 50))
    longer = torch.cat((payload, payload[:1]))
    for wrong in (payload[:-1], longer, payload[:0], payload[None], payload.to(torch.int16)):
        with pytest.raises(VerificationFailed, match=f"damaged: .* not {len(payload)} bytes") as refusal:
            one.decode(wrong, (60, 50))
        assert refusal.value.hint


def test_indices_must_ascend() -> None:
    one = codec_of(spec_of(name="topk", density=0.5, chunk=4, error_feedback=None), 0)
    for indices, taken in (([0, 3], True), ([3, 0], False), ([1, 1], False)):
        content = torch.tensor([indices[0] | indices[1] << 2], dtype=torch.uint8)
        payload = torch.cat((content, torch.ones(2).view(torch.uint8)))
        if taken:
            assert one.decode(payload, (4,)).tolist() == [1, 0, 0, 1]
        else:
            with pytest.raises(VerificationFailed, match="do not ascend"):
                one.decode(payload, (4,))
    shorter = codec_of(spec_of(name="topk", density=0.3, chunk=4, error_feedback=None), 0)
    outside = torch.cat((torch.tensor([3], dtype=torch.uint8), torch.ones(1).view(torch.uint8)))
    with pytest.raises(VerificationFailed, match="3 values"):
        shorter.decode(outside, (3,))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 700, 2999])
def test_values_that_are_not_finite_are_refused(name: str, value: float, place: int) -> None:
    tensor = drawn(60, 50)
    tensor.view(-1)[place] = value
    for feedback in (None, 1.0):
        with pytest.raises(UserError, match="not finite, or more than") as refusal:
            encoded(codec(name, feedback=feedback), tensor)
        assert refusal.value.hint


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "sign", "topk-int2", "powersgd"])
def test_values_whose_sums_may_not_be_finite_are_refused(name: str) -> None:
    tensor = drawn(60, 50)
    tensor[7, 7] = 3e38
    with pytest.raises(UserError, match="not finite, or more than"):
        encoded(codec(name), tensor)


def test_values_that_bfloat16_cannot_hold_are_refused() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max])
    assert torch.equal(codec("none").decode(encoded(codec("none"), largest), (2,)), largest)
    with pytest.raises(UserError, match="not finite, or more than"):
        encoded(codec("bf16"), largest)


@pytest.mark.parametrize("name", SPECS)
def test_the_largest_values_are_accepted(name: str) -> None:
    one = codec(name)
    tensor = torch.where(drawn(600, 500) > 0, LARGEST, -LARGEST)
    assert bool(one.decode(encoded(one, tensor), (600, 500)).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="cannot compress"):
        encoded(codec("int8"), torch.ones(3, dtype=dtype))


def test_a_state_of_another_tensor_is_refused() -> None:
    for name, part in (("int8", RESIDUAL), ("powersgd", "right")):
        one = codec(name, feedback=1.0 if part == RESIDUAL else None)
        state = one.begin("weight", (60, 50))
        wrong = {"is missing": {}, "shape": {part: state[part][:, :-1]}, "type": {part: state[part].double()}}
        for what, other in wrong.items():
            with pytest.raises(VerificationFailed, match=what):
                one.encode(drawn(60, 50), {**state, **other} if other else {})


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.exact
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shape", [(1, 300_007), (1031, 517), (40_009, 9), (9, 40_009), (701, 1501)])
@pytest.mark.parametrize("name", SPECS)
def test_bits_do_not_depend_on_the_number_of_threads(name: str, shape: tuple[int, int]) -> None:
    one = codec(name, feedback=0.95)
    found = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        state = one.begin("weight", shape)
        for seed in range(2):
            payload, state = one.encode(drawn(*shape, seed=seed), state)
        found.append((payload, one.decode(payload, shape), *(state[key] for key in sorted(state))))
    for other in found[1:]:
        for own, theirs in zip(found[0], other, strict=True):
            assert torch.equal(own.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("name", SPECS)
def test_codecs_change_nothing_that_they_are_given(name: str) -> None:
    one = codec(name, feedback=0.95)
    tensor = drawn(60, 50)
    _, state = one.encode(tensor, one.begin("weight", tensor.shape))
    before = {key: value.clone() for key, value in state.items()}
    payload, _ = one.encode(tensor, state)
    again, _ = one.encode(tensor, state)
    assert torch.equal(payload, again)
    assert torch.equal(tensor, drawn(60, 50))
    assert all(torch.equal(state[key], value) for key, value in before.items())
    copy = payload.clone()
    one.decode(payload, tensor.shape).zero_()
    assert torch.equal(payload, copy)


@pytest.mark.parametrize("name", SPECS)
def test_a_state_continues_from_a_file(name: str, tmp_path: Path) -> None:
    one = codec(name, feedback=0.95)
    _, state = one.encode(drawn(60, 50), one.begin("weight", (60, 50)))
    save_file(dict(state), tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    one_payload, one_state = one.encode(drawn(60, 50, seed=1), state)
    payload, loaded_state = one.encode(drawn(60, 50, seed=1), loaded)
    assert torch.equal(payload, one_payload)
    assert one_state.keys() == loaded_state.keys()
    assert all(torch.equal(one_state[key], loaded_state[key]) for key in one_state)


def test_tensors_that_need_gradients_are_encoded() -> None:
    one = codec("int8", feedback=1.0)
    tensor = drawn(5, 5).requires_grad_()
    payload, state = one.encode(tensor, one.begin("weight", (5, 5)))
    assert not state[RESIDUAL].requires_grad
    assert torch.equal(payload, encoded(one, drawn(5, 5)))


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("name", SPECS)
def test_payloads_may_begin_anywhere_in_memory(name: str, offset: int) -> None:
    one = codec(name)
    payload = encoded(one, drawn(61, 50))
    received = bytes(offset) + bytes(payload.numpy().tobytes())
    moved = torch.frombuffer(bytearray(received), dtype=torch.uint8, offset=offset)
    assert torch.equal(one.decode(moved, (61, 50)), one.decode(payload, (61, 50)))


@pytest.mark.parametrize("name", SPECS)
def test_decoded_values_are_written_where_they_are_wanted(name: str) -> None:
    one = codec(name, feedback=1.0)
    payload = encoded(one, drawn(60, 50))
    place = torch.full((60, 50), torch.nan)
    assert one.decode(payload, (60, 50), place) is place
    assert torch.equal(place, one.decode(payload, (60, 50)))
    for wrong in (torch.empty(50, 60), torch.empty(50, 60).T, torch.empty(60, 50, dtype=torch.float64)):
        with pytest.raises(ValueError, match="cannot decode into"):
            one.decode(payload, (60, 50), wrong)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        ("none", 1),
        ("bf16", 1 / 2),
        ("int8", (1 + 2 / 256) / 4),
        ("int4", (1 / 2 + 2 / 256) / 4),
        ("int2", (1 / 4 + 4 / 256) / 4),
        ("sign", (1 / 8 + 2 / 256) / 4),
        # 64 of 4,096 values, each with 12 bits of index and 2 bits of value, and two magnitudes of 16 bits
        ("sparse_loco", (64 * (12 + 2) + 2 * 16) / 8 / 4096 / 4),
    ],
)
def test_bytes_per_value_are_those_of_the_format(name: str, ratio: float) -> None:
    one = codec(name, feedback=1.0)
    assert one.num_bytes((4096, 1024)) == 4 * 4096 * 1024 * ratio


def test_a_round_of_sparse_loco_takes_few_bytes() -> None:
    """After 30 inner steps, one payload replaces 30 gradients: over 4,000 times fewer bytes."""
    bytes_per_value = codec("sparse_loco").num_bytes((4096, 1024)) / (4096 * 1024)
    assert bytes_per_value == pytest.approx(0.02832, rel=1e-3)
    assert 30 * 4 / bytes_per_value > 4230
    assert codec("int8").num_bytes((4096, 1024)) <= 0.26 * 4 * 4096 * 1024
