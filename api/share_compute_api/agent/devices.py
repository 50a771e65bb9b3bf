"""Selects the devices that this host lends; each joins as a separate contributor, unless ``+`` groups several."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from share_compute.device_kinds import DeviceKind
from share_compute.errors import UserError
from share_compute.topology import MOST_DEVICES
from share_compute_actors.machine.preflight import Gpu, find_apple_gpu, find_gpus

_NAMES = re.compile(r"auto|mps|(cpu|cuda)(:\d{1,4})?")
_TOGETHER = re.compile(r"(cpu|cuda):\d{1,4}")
"""Devices that may be lent together with others."""
_JOINT = "+"


@dataclass(frozen=True, slots=True)
class LentDevice:
    """A lent device: a GPU, the CPU, or a part of the CPU; or several devices of one kind, lent together."""

    name: str = "cpu"
    """``cpu``, ``cuda:K`` or ``mps`` for a GPU, or ``cpu:K`` for a part of the CPU (a logical device). Names of devices
    that are lent together are joined by ``+``."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs, in the order of their names; empty for CPUs, and for GPUs without UUIDs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each device."""
        return tuple(self.name.split(_JOINT))

    @property
    def kind(self) -> DeviceKind:
        """Kind of the devices; the devices' names begin with it."""
        return cast("DeviceKind", self.name.partition(":")[0])

    @property
    def suffix(self) -> str:
        """Ending of the contributor's name, such as ``cuda1`` or ``cuda0-1``, if the host lends other devices, too."""
        numbers = "-".join(name.partition(":")[2] for name in self.names)
        return f"{self.kind}{numbers}"


def lent_devices(wanted: Sequence[str]) -> tuple[LentDevice, ...]:
    """Return the devices with these names.

    Args:
        wanted: ``auto`` (all NVIDIA GPUs, or the CPU if there is none), ``cuda`` (all NVIDIA GPUs), ``cuda:K``,
            ``mps`` (the GPU of an Apple processor), ``cpu``, or ``cpu:K`` for a logical device. ``cuda:0+cuda:1`` lends
            several devices of one kind together. An empty sequence means ``auto``.

    Raises:
        UserError: a name is unknown or given twice, a device does not exist, there are too many, or devices of two
            kinds are to be lent together.
        Unavailable: the driver of the GPUs does not work.
    """
    words = wanted or ("auto",)
    for word in words:
        _check(word)
    gpus = () if all(word.startswith(("cpu", "mps")) for word in words) else find_gpus()
    devices = tuple(device for word in words for device in _named(word, gpus))
    counts = Counter(name for device in devices for name in device.names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise UserError(f"{twice[0]} is named twice", hint="name each device once with --device")
    if counts.total() > MOST_DEVICES:
        raise UserError(
            f"{counts.total()} devices are to be lent, but at most {MOST_DEVICES} can join with one invite",
            hint="choose some with --device, and let the others join with another invite and another --name",
        )
    return devices


def _check(word: str) -> None:
    parts = word.split(_JOINT)
    for part in parts:
        if not _NAMES.fullmatch(part):
            raise UserError(
                f"{part!r} is no device",
                hint="use auto, cpu, cuda, cuda:0, mps, cpu:0 and cpu:1 for parts of the CPU, or cuda:0+cuda:1",
            )
    if len(parts) == 1:
        return
    for part in parts:
        if not _TOGETHER.fullmatch(part):
            raise UserError(
                f"{part} cannot be lent together with other devices: --device {word}",
                hint="name single devices such as cuda:0+cuda:1 or cpu:0+cpu:1",
            )
    kinds = sorted({part.partition(":")[0] for part in parts})
    if len(kinds) > 1:
        raise UserError(
            f"--device {word} joins devices of two kinds, {kinds[0]} and {kinds[1]}",
            hint="lend devices of one kind together, and name the others with another --device",
        )


def _named(word: str, gpus: Sequence[Gpu]) -> Iterator[LentDevice]:
    if _JOINT in word:
        parts = [device for part in word.split(_JOINT) for device in _named(part, gpus)]
        yield LentDevice(word, tuple(gpu for part in parts for gpu in part.gpus))
    elif word.startswith("cpu") or (word == "auto" and not gpus):
        yield LentDevice("cpu" if word == "auto" else word)
    elif word == "mps":
        if find_apple_gpu() is None:
            raise UserError("--device mps, but no Apple GPU is here", hint="use --device cpu")
        yield LentDevice(word)
    elif word in ("auto", "cuda") and gpus:
        yield from (LentDevice(f"cuda:{index}", (gpu.uuid,)) for index, gpu in enumerate(gpus))
    elif not gpus:
        raise UserError(
            f"--device {word}, but no NVIDIA GPU is here", hint="use --device cpu, and see nvidia-smi"
        )
    elif (index := int(word.partition(":")[2])) < len(gpus):
        yield LentDevice(f"cuda:{index}", (gpus[index].uuid,))
    else:
        found = ", ".join(f"cuda:{place} {gpu.name}" for place, gpu in enumerate(gpus))
        raise UserError(f"--device {word}, but the GPUs here are {found}", hint="name one of these")
