"""Messages that may reach a process on the server: bytes of declared schemas, never a pickle."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from share_compute.errors import ContributorLost, NoCopy, OutOfMemory, ShareComputeError, UserError
from share_compute.inference.scheduler.engine_steps import Pooled, SampledToken, StepResult
from share_compute.planning.cost.timings import LayerTiming
from share_compute.protocol.membership import ShardPart
from share_compute.protocol.messages import Applied, Broken, Formed, Prepared, Rejected, Report, TensorLabel
from share_compute_actors.inference.messages import Trouble, pack_to_server, unpack_to_server
from share_compute_actors.messages import MemberStatus, StepFigures
from share_compute_actors.training.member.schemas import LOGITS, STATUS, pack_said, unpack_said
from share_compute_actors.transport.keys import PEER, Peer
from share_compute_actors.transport.pieces import PIECE, Piece, take_all
from share_compute_actors.wire import (
    COUNT,
    NOTHING,
    Schema,
    Undeclared,
    pack_answer,
    pack_failure,
    unpack_answer,
)

STATUS_OF_C0 = MemberStatus("c0", 4, 10**9, 2 * 10**9, 5, ShardPart(0, 3), None, 0)
SAID = [
    Report(3, "c0", 4, 5, frozenset({1, 2}), frozenset({1}), frozenset(), frozenset({7}), is_reduced=True),
    Formed(3, "c0"),
    Prepared(3, "c0", 5, {"model.norm": 0.1 + 0.2, "lm_head": float("inf")}, {0: -1.5, 11: 1e-300}, "ab"),
    Broken(3, "c0"),
    Rejected(
        3, "c0", "c1", TensorLabel(5, "activation", 11, 0), "its numbers are not finite", is_certain=False
    ),
    # The sender of the tensor made the label.
    Rejected(3, "c0", "c1", TensorLabel(2**52, "log", -1, 2**52), "it has 24 bytes, which are no float32"),
    Applied(3, "c0", 5),
]
TO_SERVER = [
    StepResult(1, 2, (SampledToken(7, 12, 99, -0.25, ((99, -0.25), (3, -2.0)), "stop"),)),
    StepResult(1, 2, (Pooled(7, 12, bytes(range(256))),)),
    StepResult(1, 2, ()),
]


# -- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_what_a_member_says_arrives_as_it_was_said(message: Any) -> None:
    figures = StepFigures(12, 0.1, 0.05)
    assert unpack_said(pack_said(message, figures), "c0", "machine-0", 12) == (message, figures)
    assert unpack_said(pack_said(message, None), "c0", "machine-0", 12) == (message, None)


@pytest.mark.parametrize(
    "message",
    [
        Report(3, "c0", 4, 5, frozenset({12})),
        Report(3, "c0", 4, 5, gradients=frozenset({-1})),
        Prepared(3, "c0", 5, losses={10**30: 1.0}),
    ],
)
def test_nobody_speaks_of_microbatches_that_there_are_not(message: Any) -> None:
    with pytest.raises(Undeclared, match="microbatches"):
        unpack_said(pack_said(message, None), "c0", "machine-0", 12)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (Prepared(3, "c0", 5, {"lm_head": -1e-3}), "a squared norm below zero"),
        (Prepared(3, "c0", 5, {"lm_head": float("-inf")}), "a squared norm below zero"),
        (Rejected(3, "c0", "c1", TensorLabel(5, "log", 0, 0), "x" * 2**20), "a reason of 1048576 characters"),
    ],
    ids=["negative", "infinite", "long"],
)
def test_what_is_said_of_numbers_can_be_used(message: Any, fault: str) -> None:
    with pytest.raises(Undeclared, match=f"machine-0 .*: {fault}"):
        unpack_said(pack_said(message, None), "c0", "machine-0", 12)


@pytest.mark.parametrize(
    "figures",
    [
        StepFigures(-1, 0.1, 0.1),
        StepFigures(10**30, 0.1, 0.1),
        StepFigures(1, float("nan"), 0.1),
        StepFigures(1, 0.1, float("inf")),
        StepFigures(1, 0.1, 0.1, {0: LayerTiming(0.1, float("nan"))}),
        StepFigures(1, 0.1, 0.1, {0: LayerTiming(-0.1, 0.1)}),
    ],
    ids=repr,
)
def test_times_and_counts_are_such(figures: StepFigures) -> None:
    with pytest.raises(Undeclared, match="machine-0"):
        unpack_said(pack_said(Formed(3, "c0"), figures), "c0", "machine-0", 12)


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_nobody_speaks_for_another_member(message: Any) -> None:
    with pytest.raises(Undeclared, match=r"machine-1 .* in the name of another member"):
        unpack_said(pack_said(message, None), "c1", "machine-1", 12)


@pytest.mark.parametrize("message", TO_SERVER, ids=repr)
def test_what_comes_of_steps_arrives_as_it_was_said(message: Any) -> None:
    assert unpack_to_server(pack_to_server(message), "machine-0") == message


ERRORS: list[ShareComputeError] = [
    ContributorLost("gone", machine="machine-3", step=4, job="job-1", hint="resume"),
    OutOfMemory("too little", details={"taken_bytes": 17}),
    NoCopy("no room", details={"lacks_space": True, "epoch": 3, "owner": "c1"}),
    UserError("wrong", details={"fields": [{"field": "a", "problem": "b"}]}),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_errors_arrive_as_they_were_raised(error: ShareComputeError) -> None:
    found: list[ShareComputeError] = []
    unpacked, _ = unpack_said(pack_said(error, None), "c0", "machine-0", 12)
    assert isinstance(unpacked, ShareComputeError)
    found.append(unpacked)
    with pytest.raises(type(error)) as raised:
        unpack_answer(NOTHING, pack_failure(error), "machine-0")
    found.append(raised.value)
    trouble = unpack_to_server(pack_to_server(Trouble(1, error, 2)), "machine-0")
    assert isinstance(trouble, Trouble)
    for one in (*found, trouble.failure):
        assert type(one) is type(error)
        assert (one.message, one.facts()) == (error.message, error.facts())


def test_an_error_of_another_class_arrives_as_the_nearest_that_is_known() -> None:
    class OfMember(ContributorLost):
        pass

    with pytest.raises(ContributorLost) as raised:
        unpack_answer(NOTHING, pack_failure(OfMember("gone")), "machine-0")
    assert type(raised.value) is ContributorLost


@pytest.mark.parametrize(
    "kind", ["OutOfMemory", "NoCopy", "Busy", "Undeclared", "_rebuild", "Exception", "x" * 99]
)
def test_errors_without_their_facts_or_without_a_name_are_refused(kind: str) -> None:
    data = b"-" + json.dumps([{"kind": kind, "message": "m"}]).encode()
    with pytest.raises(Undeclared, match="machine-0"):
        unpack_answer(NOTHING, data, "machine-0")


def _packed(**changes: Any) -> bytes:
    (known,) = json.loads(STATUS.pack(STATUS_OF_C0))
    return json.dumps([{**known, **changes}]).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"[null]",
        b"[" * 100_000,
        b"\xff\xfe",
        _packed(evil=1),
        _packed(**{"evil" * 10_000: 1}),
        _packed(step="4"),
        _packed(step=4.5),
        _packed(worker=None),
        _packed(resident_bytes=-1),
        _packed(resident_bytes=10**40),
        _packed(holds=[0]),
        _packed(holds=[0, 1, 0, 1, 2]),
        _packed(holds={"0": 1}),
        b"[" + b" " * (17 * 2**20) + b"]",
        pickle.dumps(STATUS_OF_C0),
        STATUS.pack(STATUS_OF_C0)[:-1],
        STATUS.pack(STATUS_OF_C0) * 2,
        None,
        "text",
        [1],
        STATUS_OF_C0,
    ],
    ids=lambda data: repr(data)[:40],
)
def test_anything_else_is_the_fault_of_its_sender(data: Any) -> None:
    with pytest.raises(Undeclared, match="machine-0") as refused:
        STATUS.unpack(data, "machine-0")
    assert refused.value.machine == "machine-0"
    assert len(refused.value.message) < 500


READERS: list[Callable[[Any], Any]] = [
    lambda data: STATUS.unpack(data, "m"),
    lambda data: PEER.unpack(data, "m"),
    lambda data: PIECE.unpack(data, "m"),
    lambda data: LOGITS.unpack(data, "m"),
    lambda data: COUNT.unpack(data, "m"),
    lambda data: unpack_said(data, "c0", "m", 12),
    lambda data: unpack_to_server(data, "m"),
    lambda data: unpack_answer(STATUS, data, "m"),
]
SEEDS = [
    STATUS.pack(STATUS_OF_C0),
    PEER.pack(Peer("c0", "machine-0", "tcp://127.0.0.1:1", b"k" * 40)),
    PIECE.pack(Piece.sealed("model-0000-0000.part", np.arange(9, dtype=np.uint8))),
    LOGITS.pack(np.ones(3, dtype=np.float32)),
    *(pack_said(message, None) for message in SAID),
    *(pack_to_server(message) for message in TO_SERVER),
    pack_answer(STATUS, STATUS_OF_C0),
    pack_failure(ERRORS[2]),
]


@given(
    st.binary(max_size=300)
    | st.builds(
        lambda seed, at, new: seed[: at % (len(seed) + 1)] + new + seed[at % (len(seed) + 1) + len(new) :],
        st.sampled_from(SEEDS),
        st.integers(0, 10_000),
        st.binary(max_size=8),
    )
)
def test_any_bytes_are_a_message_or_the_declared_error(data: bytes) -> None:
    for read in READERS:
        try:
            read(data)
        except ShareComputeError as failure:
            assert failure.message  # noqa: PT017 - either is well


# -- raw bytes -----------------------------------------------------------------------------------------------------


def test_tensors_travel_as_raw_bytes() -> None:
    piece = Piece.sealed("model-0001-0000.part", np.arange(1000, dtype=np.uint8))
    found = PIECE.unpack(PIECE.pack(piece), "machine-0")
    assert found is not None
    assert found.is_whole
    assert found.name == piece.name
    assert np.array_equal(found.content, piece.content)
    assert PIECE.unpack(PIECE.pack(None), "machine-0") is None
    logits = np.array([0.1, float("-inf"), 3e38], dtype=np.float32)
    unpacked = LOGITS.unpack(LOGITS.pack(logits), "machine-0")
    assert unpacked is not None
    assert unpacked.tobytes() == logits.tobytes()
    assert LOGITS.unpack(LOGITS.pack(None), "machine-0") is None


@pytest.mark.parametrize(
    "name",
    [
        "../../../home/operator/.bashrc",
        "/etc/cron.d/job",
        "model-0000-../../x.part",
        "config.json",
        "model-0000-0000.part\n",
        "model-0001-0000.part",
        "",
    ],
)
def test_a_member_names_no_file_but_its_own_parts(name: str) -> None:
    pieces = iter([Piece.sealed(name, np.zeros(3, dtype=np.uint8)), None])
    written: list[str] = []
    with pytest.raises(Undeclared, match="machine-0"):
        take_all("machine-0", 0, lambda _: next(pieces), lambda file, _: written.append(file))
    assert not written


# -- pickles -------------------------------------------------------------------------------------------------------

_CHILD = """
import sys
from share_compute_actors.unpickling import PickleRefused, refuse_pickles
import ray, ray.cloudpickle, ray._raylet as raylet
import ray._private.function_manager as functions
import ray._private.serialization as serialization
import ray.exceptions as exceptions
refuse_pickles()
refuse_pickles()
data = bytes.fromhex(sys.stdin.read())
for module in (
    ray.cloudpickle, ray.cloudpickle.cloudpickle, functions.pickle, serialization.pickle, exceptions.pickle,
    raylet.pickle,
):
    for read in (module.loads, module.load):
        try:
            read(data)
        except PickleRefused:
            continue
        sys.exit(f"{module.__name__} read it")
failure = exceptions.RayTaskError("f", "the trace", ValueError("x"), "title", 1, "ip").to_bytes()
found = exceptions.RayError.from_bytes(failure)
assert isinstance(found, exceptions.UnserializableException), found
assert raylet.ray_pickle.loads(data) is None  # where an error would end the process
import pickle
for module in (raylet.pickle, raylet.ray_pickle, ray.cloudpickle):
    assert pickle.loads(module.dumps({1: 2})) == {1: 2}  # what is not Ray's own stays as it was
"""
_CONTROL = "import pickle, sys; pickle.loads(bytes.fromhex(sys.stdin.read()))"


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def _nested(marker: str) -> bytes:
    """Look a function up by `getattr`, over a module that `importlib` gives."""
    return (
        b"cbuiltins\ngetattr\n(cimportlib\nimport_module\n(S'os'\ntRS'system'\ntR(S'touch "
        + marker.encode()
        + b"'\ntR."
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda marker: pickle.dumps(_Calls(os.system, f"touch {marker}")),
        lambda marker: pickle.dumps(_Calls(subprocess.check_call, ["touch", marker])),
        lambda marker: pickle.dumps(_Calls(eval, f"open({marker!r}, 'w')")),
        lambda marker: pickle.dumps([{"a": (_Calls(open, marker, "w"),)}], 5),
        lambda marker: pickle.dumps(_Calls(Path(marker).touch)),
        _nested,
        lambda marker: pickle.dumps(np.array([_Calls(os.mkdir, marker)], dtype=object)),
        lambda marker: (
            b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x05mkdir\x93\x8c"
            + bytes([len(marker)])
            + marker.encode()
            + b"\x85R."
        ),
        lambda marker: b"(S'" + marker.encode() + b"'\nios\nmkdir\n.",
        lambda _: pickle.dumps({"only": ["plain", 1, 2.0]}),
    ],
    ids=["system", "subprocess", "eval", "nested", "method", "getattr", "array", "stack", "inst", "plain"],
)
def test_no_pickle_is_read_by_any_of_rays_readers(make: Callable[[str], bytes], tmp_path: Path) -> None:
    marker = tmp_path / "m"
    data = make(str(marker))
    assert _run(_CHILD, data) == ""
    assert not marker.exists()
    _run(_CONTROL, data)
    assert marker.exists() == (b"plain" not in data)  # otherwise it would have run


def _run(code: str, data: bytes) -> str:
    """Run code that reads a pickle; return its errors."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, input=data.hex(), text=True, capture_output=True, check=False).stderr


def test_a_schema_is_known_in_another_process() -> None:
    known: Schema[int] = pickle.loads(pickle.dumps(COUNT))
    assert known.unpack(COUNT.pack(3), "machine-0") == 3
