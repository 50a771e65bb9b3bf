"""Selects the devices that this host lends; each device joins as a separate contributor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from share_compute.device_kinds import DeviceKind
from share_compute.errors import UserError
from share_compute.topology import MOST_DEVICES
from share_compute_actors.machine.preflight import Gpu, find_apple_gpu, find_gpus

_NAMES = re.compile(r"auto|mps|(cpu|cuda)(:\d{1,4})?")


@dataclass(frozen=True, slots=True)
class LentDevice:
    """A device that is lent: a GPU, the CPU, or a part of the CPU."""

    name: str = "cpu"
    """``cpu``, ``cuda:K`` or ``mps`` for a GPU, or ``cpu:K`` for a part of the CPU (a logical device)."""
    gpu: str | None = None
    """UUID of the GPU; None for a CPU, and for GPUs without UUIDs."""

    @property
    def kind(self) -> DeviceKind:
        """Kind of the device, with which its name begins."""
        return cast("DeviceKind", self.name.partition(":")[0])


def lent_devices(wanted: Sequence[str]) -> tuple[LentDevice, ...]:
    """Return the devices with these names.

    Args:
        wanted: ``auto`` (all NVIDIA GPUs, or the CPU if there is none), ``cuda`` (all NVIDIA GPUs), ``cuda:K``,
            ``mps`` (the GPU of an Apple processor), ``cpu``, or ``cpu:K`` for a logical device. An empty sequence means
            ``auto``.

    Raises:
        UserError: a name is unknown or given twice, a device does not exist, or there are too many.
        Unavailable: the driver of the GPUs does not work.
    """
    for word in wanted:
        if not _NAMES.fullmatch(word):
            raise UserError(
                f"{word!r} is no device",
                hint="use auto, cpu, cuda, cuda:0, mps, or cpu:0 and cpu:1 for parts of the CPU",
            )
    words = wanted or ("auto",)
    gpus = () if all(word.startswith(("cpu", "mps")) for word in words) else find_gpus()
    devices = tuple(device for word in words for device in _named(word, gpus))
    if twice := [device.name for place, device in enumerate(devices) if device in devices[:place]]:
        raise UserError(f"{twice[0]} is named twice", hint="name each device once with --device")
    if len(devices) > MOST_DEVICES:
        raise UserError(
            f"{len(devices)} devices are to be lent, but at most {MOST_DEVICES} can join with one invite",
            hint="choose some with --device, and let the others join with another invite and another --name",
        )
    return devices


def _named(word: str, gpus: Sequence[Gpu]) -> Iterator[LentDevice]:
    if word.startswith("cpu") or (word == "auto" and not gpus):
        yield LentDevice("cpu" if word == "auto" else word)
    elif word == "mps":
        if find_apple_gpu() is None:
            raise UserError("--device mps, but no Apple GPU is here", hint="use --device cpu")
        yield LentDevice(word)
    elif word in ("auto", "cuda") and gpus:
        yield from (LentDevice(f"cuda:{index}", gpu.uuid) for index, gpu in enumerate(gpus))
    elif not gpus:
        raise UserError(
            f"--device {word}, but no NVIDIA GPU is here", hint="use --device cpu, and see nvidia-smi"
        )
    elif (index := int(word.partition(":")[2])) < len(gpus):
        yield LentDevice(f"cuda:{index}", gpus[index].uuid)
    else:
        found = ", ".join(f"cuda:{place} {gpu.name}" for place, gpu in enumerate(gpus))
        raise UserError(f"--device {word}, but the GPUs here are {found}", hint="name one of these")
