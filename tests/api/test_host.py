"""Several devices of one host join by one invite and are lent side by side; here, parts of a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.api.test_service import door  # noqa: F401 - a fixture

from share_compute.errors import Conflict, UserError
from share_compute.jobs.states import ContributorState
from share_compute.store import Store
from share_compute_actors.machine.preflight import Gpu
from share_compute_api import devices as devices_module
from share_compute_api.devices import MOST_DEVICES, LentDevice, lent_devices
from share_compute_api.host import enroll
from share_compute_api.identity import Identities
from share_compute_api.joining import JoinOptions, split

GPUS = (Gpu("GPU-aa", "first"), Gpu("GPU-bb", "second"))
MIB = 2**20


@pytest.mark.parametrize(
    ("wanted", "gpus", "names"),
    [
        ((), (), ["cpu"]),
        ((), GPUS, ["cuda:0", "cuda:1"]),
        (("auto",), GPUS, ["cuda:0", "cuda:1"]),
        (("cuda",), GPUS, ["cuda:0", "cuda:1"]),
        (("cuda:1",), GPUS, ["cuda:1"]),
        (("cpu",), GPUS, ["cpu"]),
        (("cuda:1", "cpu"), GPUS, ["cuda:1", "cpu"]),
        (("cpu:0", "cpu:1"), (), ["cpu:0", "cpu:1"]),
    ],
)
def test_devices_are_named(
    wanted: tuple[str, ...], gpus: tuple[Gpu, ...], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "find_gpus", lambda: gpus)
    found = lent_devices(wanted)
    assert [device.name for device in found] == names
    by_name = {f"cuda:{index}": gpu.uuid for index, gpu in enumerate(gpus)}
    assert [device.gpu for device in found] == [by_name.get(name) for name in names]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (("gpu",), "'gpu' is no device"),
        (("cuda:2",), "the GPUs here are cuda:0 first, cuda:1 second"),
        (("cpu:1", "cpu:1"), "cpu:1 is named twice"),
        (("cuda", "cuda:0"), "cuda:0 is named twice"),
        (tuple(f"cpu:{number}" for number in range(MOST_DEVICES + 1)), "17 devices"),
    ],
)
def test_devices_that_cannot_be_lent_are_named(
    wanted: tuple[str, ...], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices_module, "find_gpus", lambda: GPUS)
    with pytest.raises(UserError, match=problem):
        lent_devices(wanted)


def test_what_is_lent_is_divided_among_devices() -> None:
    options = JoinOptions("http://h:1", None, "box", memory_bytes=2048 * MIB, cpu_threads=1)
    (whole,) = split(options, [LentDevice("cuda:0", "GPU-aa")])
    assert (whole.name, whole.memory_bytes) == ("box", 2048 * MIB)
    parts = split(options, [LentDevice("cpu:0"), LentDevice("cuda:1", "GPU-bb")])
    assert [part.name for part in parts] == ["box.cpu0", "box.cuda1"]
    assert [(part.memory_bytes, part.cpu_threads) for part in parts] == [(1024 * MIB, 1)] * 2
    with pytest.raises(UserError, match="are available"):
        split(replace(options, memory_bytes=2**60), [part.device for part in parts])


def test_all_devices_join_with_one_invite(door: str, store: Store, tmp_path: Path) -> None:  # noqa: F811
    identities = Identities(tmp_path / "own")

    def enrolled(invite: str | None, *names: str) -> dict[str, str]:
        """Join with these logical devices; return contributors by name."""
        options = JoinOptions(door, invite, "box", memory_bytes=len(names) * 600 * MIB, cpu_threads=1)
        enroll(split(options, [LentDevice(name) for name in names]), lambda _: None, identities, "box")
        return {
            one.name: one.id for one in store.contributors.list(list(ContributorState)) if not one.left_at
        }

    with pytest.raises(UserError, match="did not join"):
        enrolled(None, "cpu:0", "cpu:1")
    _, code = store.invites.create()
    first = enrolled(code, "cpu:0", "cpu:1")
    assert sorted(first) == ["box.cpu0", "box.cpu1"]
    assert enrolled(None, "cpu:0", "cpu:1") == first  # they have their keys
    more = enrolled(None, "cpu:0", "cpu:1", "cpu:2")  # a device that was added needs no invite
    assert more.keys() - first.keys() == {"box.cpu2"}
    with pytest.raises(Conflict, match=r"box\.cpu0"):
        enrolled(store.invites.create()[1], "cpu:0", "cpu:1")
    for contributor in more.values():
        store.contributors.leave(contributor)
    again = enrolled(store.invites.create()[1], "cpu:0", "cpu:1")
    assert not set(again.values()) & set(more.values())  # a new invite makes all anew
    assert store.contributors.get(again["box.cpu1"]).sibling_of == again["box.cpu0"]
    for contributor in again.values():
        store.contributors.leave(contributor)
    # Left with one device, the host has its own name again, and still needs no invite.
    assert store.contributors.get(enrolled(None, "cpu")["box"]).sibling_of == again["box.cpu0"]
