"""Topology files: written files can be read again, and impossible values are refused with their field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from share_compute import __version__
from share_compute.errors import UserError
from share_compute.files.plain_text import is_plain, plain
from share_compute.files.topology_file import describe_topology, parse_topology, read_topology, write_topology
from share_compute.planning.network.regions import complete
from share_compute.topology import HEAD, MOST_BYTES, Contributor, Device, Link, Topology, absurdities

EXAMPLES = Path(__file__).parents[3] / "examples" / "topologies"
GOOD: dict[str, Any] = {
    "kind": "topology",
    "version": 1,
    "contributors": [
        {"name": "desk", "devices": [{"memory_bytes": 16e9, "flops_per_s": {"float32": 2e11}}]},
        {"name": "laptop", "devices": [{"memory_bytes": 8e9, "flops_per_s": {"float32": 1e11}}]},
    ],
    "links": [{"source": "desk", "target": "laptop", "latency_s": 1e-3, "bytes_per_s": 1e8}],
}

words = st.text(min_size=1, max_size=20).filter(lambda text: text != HEAD and text.isprintable())
speeds = st.floats(1e-3, 1e18)
devices = st.builds(
    Device,
    kind=st.sampled_from(["cpu", "cuda"]),
    name=words,
    memory_bytes=st.integers(1, MOST_BYTES),
    flops_per_s=st.dictionaries(st.sampled_from(["bfloat16", "float16"]), speeds).map(
        lambda others: {"float32": 1e11, **others}
    ),
    memory_bytes_per_s=st.floats(0, 1e18),
    overhead_s=st.floats(0, 0.1),
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    ids = draw(st.lists(words, max_size=4, unique=True))
    machines = tuple(
        Contributor(
            id=name,
            name=name if draw(st.booleans()) else f"machine {index}",
            devices=tuple(draw(st.lists(devices, min_size=1, max_size=2))),
            cpu_threads=draw(st.integers(1, 128)),
            address=draw(st.sampled_from(["", "192.0.2.1", "fd00::1"])),
            host=draw(st.sampled_from(["", "desk"])),
            host_threads=draw(st.integers(0, 256)),
        )
        for index, name in enumerate(ids)
    )
    ends = st.sampled_from([*ids, HEAD])
    pairs = (
        draw(st.lists(st.tuples(ends, ends).filter(lambda pair: pair[0] != pair[1]), max_size=5))
        if ids
        else []
    )
    links = tuple(Link(*pair, draw(st.floats(0, 60)), draw(st.floats(0, 1e18))) for pair in pairs)
    names = [machine.name for machine in machines]
    return Topology(
        machines if len(set(names)) == len(names) else (), links if len(set(names)) == len(names) else ()
    )


@pytest.mark.parametrize("form", ["yaml", "json"])
@settings(max_examples=60, deadline=None)
@given(topology=topologies())
def test_what_is_written_is_read_again(form: Any, topology: Topology) -> None:
    text = write_topology(topology, form)
    assert read_topology(text) == topology
    assert write_topology(read_topology(text), form) == text


def test_node_ids_and_unmeasured_machines_stay_at_home() -> None:
    device = Device("cpu", "cpu", 2**30, {"float32": 1e10})
    measured = Contributor("con-1", "desk", (device,), node_id="f" * 56)
    unmeasured = Contributor("con-2", "new", ())
    text = write_topology(Topology((measured, unmeasured), (Link("con-1", "con-2", 0.1, 1e6),)))
    assert "ffff" not in text
    assert [machine.name for machine in read_topology(text).contributors] == ["desk"]
    assert read_topology(text).links == ()


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_examples_are_topologies(file: Path) -> None:
    topology = read_topology(file.read_text(encoding="utf-8"))
    assert len(topology.contributors) == 5
    network = complete(topology)
    assert network.region.tolist() == [0, 0, 0, 1, 2], "one wire, one Wi-Fi, one across town"
    assert not network.assumed


def test_an_empty_cluster_is_a_topology() -> None:
    assert read_topology("kind: topology\nversion: 1\n").contributors == ()
    assert read_topology(write_topology(Topology(()))) == Topology(())


def broken(path: str, value: Any) -> dict[str, Any]:
    document: Any = copy.deepcopy(GOOD)
    *above, last = path.split(".")
    here = document
    for part in above:
        here = here[int(part)] if part.isdigit() else here[part]
    here[int(last) if last.isdigit() else last] = value
    return document  # type: ignore[no-any-return]


DEVICE = "contributors.1.devices.0"


@pytest.mark.parametrize("value", [-1, 0, float("nan"), float("inf"), 2**70, "much", None])
@pytest.mark.parametrize("field", [f"{DEVICE}.memory_bytes", f"{DEVICE}.flops_per_s.float32"])
def test_absurd_capacity_is_refused_with_machine_and_field(field: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        parse_topology(broken(field, value))
    assert "laptop" in error.value.message
    assert field.split(".")[4] in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("latency_s", -0.1),
        ("latency_s", 61),
        ("latency_s", float("nan")),
        ("bytes_per_s", -1),
        ("bytes_per_s", float("inf")),
        ("bytes_per_s", 1e19),
    ],
)
def test_absurd_links_are_refused_with_both_ends(field: str, value: float) -> None:
    with pytest.raises(UserError) as error:
        parse_topology(broken(f"links.0.{field}", value))
    assert "desk - laptop" in error.value.message
    assert field in error.value.message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("links.0.target", "desk", "linked to itself"),
        ("links.0.target", "desktop", "no machine 'desktop'"),
        ("contributors.1.name", "desk", "two machines have the name 'desk'"),
        ("contributors.1.id", "desk", "two machines have the id 'desk'"),
        ("contributors.1.name", "head", "'head' stands for the server"),
        ("contributors.1.devices", [], "devices"),
        ("contributors.1.adress", "192.0.2.1", "did you mean 'address'?"),
        (f"{DEVICE}.memory", 5, "did you mean 'memory_bytes'?"),
        (f"{DEVICE}.flops_per_s", {}, "float32 is missing"),
        (f"{DEVICE}.flops_per_s", {"bfloat16": 1e12}, "float32 is missing"),
        (f"{DEVICE}.flops_per_s", {"flaot32": 1e12}, "did you mean 'float32'?"),
        (f"{DEVICE}.memory_bytes", "8GiB", "8589934592 (8 GiB)"),
        (f"{DEVICE}.memory_bytes", 1e30, "2^60"),
        (f"{DEVICE}.memory_bytes", 1.5, "not a whole number"),
        (f"{DEVICE}.memory_bytes", True, "number of bytes"),
    ],
)
def test_what_does_not_fit_together_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_topology(broken(path, value))
    assert message in error.value.message


@pytest.mark.parametrize("name", ["0e0", "1e5", "12", "null", "yes", "2024-01-02"])
def test_names_that_look_like_numbers_stay_names(name: str) -> None:
    machine = Contributor(name, name, (Device("cpu", name, 2**30, {"float32": 1e10}),))
    assert read_topology(write_topology(Topology((machine,)))) == Topology((machine,))


def test_one_mistake_is_reported_once() -> None:
    with pytest.raises(UserError) as error:
        parse_topology(broken(f"{DEVICE}.memory_bytes", "much"))
    (field,) = error.value.details["fields"]
    assert field["field"] == f"{DEVICE}.memory_bytes"


@pytest.mark.parametrize("path", ["name", "id", "address", "devices.0.name"])
@pytest.mark.parametrize("text", ["a\x1b[31mb", "a\nb", "a\x9bb", "a\u2028b"])
def test_names_cannot_command_a_terminal(path: str, text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_topology(broken(f"contributors.1.{path}", text))
    assert "no control characters" in error.value.message
    assert is_plain(error.value.message)
    assert plain(text) in error.value.message or path != "name"


def test_what_was_measured_is_written_whatever_a_device_calls_itself() -> None:
    device = Device("cpu", "x\x1b[2J", 2**30, {"float32": 1e10})
    half = Device("cuda", "y", 2**30, {"bfloat16": 1e10})
    document = describe_topology(Topology((Contributor("c", "desk", (device, half)),)))
    assert [each.name for each in document.contributors[0].devices] == ["x\\x1b[2J"]


def test_a_dead_link_is_kept() -> None:
    topology = parse_topology(broken("links.0.bytes_per_s", 0))
    assert complete(topology).link(0, 1)[1] == 0


@pytest.mark.parametrize("version", [0, 2, -1])
def test_another_version_is_refused_with_both_versions(version: Any) -> None:
    with pytest.raises(UserError) as error:
        parse_topology({**GOOD, "version": version})
    assert f"version {version!r}" in error.value.message
    assert f"share-compute {__version__} reads version 1" in error.value.message
    assert "share-compute topology" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: tiny\nmodel: {path: x}\n", "does not say its kind"),
        ("kind: train\n", "is of kind 'train'"),
        ("- 1\n", "not list"),
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("kind: topology\n", "version is missing"),
        ("kind: topology\nversion: true\n", "whole number, not True"),
        ("kind: topology\nversion: '1'\n", "whole number, not '1'"),
        ("kind: [\n", "line 1"),
        ('{"kind": "topology",}', "line 1"),
        ('{"kind": "topology", "kind": "topology"}', "given twice"),
        ("kind: topology\nversion: 1\nkind: topology\n", "given twice"),
    ],
)
def test_what_is_no_topology_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        read_topology(text)
    assert message in error.value.message
    assert error.value.hint


def test_numbers_may_be_written_short() -> None:
    text = yaml.safe_dump(GOOD).replace("16000000000.0", "16e9")
    assert "16e9" in text
    assert read_topology(text).contributors[0].memory_bytes == 16_000_000_000
    assert read_topology(json.dumps(GOOD)) == parse_topology(GOOD)


def test_what_a_probe_may_say() -> None:
    good = Device("cpu", "cpu", 2**30, {"float32": 1e10})
    assert list(absurdities(good)) == []
    assert list(absurdities(Link("a", "b", 0.0, 0.0))) == [], "a dead link is one"
    lie = Device("cpu", "cpu", -1, {"float32": float("nan"), "bfloat16": 0.0}, float("inf"), 1.0)
    assert [field for field, _ in absurdities(lie)] == [
        "memory_bytes",
        "flops_per_s.float32",
        "flops_per_s.bfloat16",
        "memory_bytes_per_s",
        "overhead_s",
    ]
    assert [field for field, _ in absurdities(Link("a", "a", 1e9, -1.0))] == [
        "latency_s",
        "bytes_per_s",
        "target",
    ]
