"""Topology files in YAML or JSON: descriptions of machines and links, for planning without access to the machines.

Sizes are in bytes, speeds in FLOP/s, bandwidths in bytes/s and times in seconds.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from share_compute import __version__
from share_compute.device_kinds import DeviceKind
from share_compute.errors import UserError
from share_compute.files.field_errors import field_errors, fields_text
from share_compute.files.plain_text import PlainText, plain
from share_compute.files.plain_yaml import read_json, read_yaml, write_yaml
from share_compute.files.strict import StrictModel, nearest
from share_compute.labels import Labels
from share_compute.topology import (
    BASE_DTYPE,
    DTYPES,
    HEAD,
    MOST_BYTES,
    MOST_LATENCY_S,
    MOST_OVERHEAD_S,
    MOST_PER_S,
    Contributor,
    Device,
    Link,
    Topology,
    limited_links,
)

VERSION = 1
"""Version of the format. Increase it when a field changes its meaning."""
KIND = "topology"
_MOST_YAML_BYTES = 16 << 20
"""Maximum size of a YAML file in bytes: larger than for job files, because programs write files with many machines."""
_EXAMPLE = "start from examples/topologies/lan.yaml"


def _bytes(value: Any) -> Any:
    """Return a number of bytes as an integer; accept whole floats such as 16e9."""
    hint = "give the number of bytes, e.g. 8589934592 (8 GiB) or 8e9"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{hint}, not {value!r}")  # noqa: TRY004  # pydantic does not catch a TypeError
    if not 0 < value <= MOST_BYTES:
        raise ValueError(f"{value:g} bytes is not more than 0 and at most 2^60; {hint}")
    if value != int(value):
        raise ValueError(f"{value!r} is not a whole number; {hint}")
    return int(value)


class _Entry(StrictModel):
    model_config = ConfigDict(allow_inf_nan=False)


class DeviceEntry(_Entry):
    """Compute device, with measured values or those of a data sheet."""

    kind: DeviceKind = "cpu"
    name: PlainText = Field(default="", max_length=200)
    """Name for people."""
    memory_bytes: Annotated[int, BeforeValidator(_bytes)] = Field(gt=0, le=MOST_BYTES)
    """Memory that its owner lends."""
    flops_per_s: dict[str, float] = Field(json_schema_extra={"minProperties": 1})
    """Speed of a dense matrix product, by dtype name: ``{float32: 5.1e10}``."""
    memory_bytes_per_s: float = Field(default=0.0, ge=0, le=MOST_PER_S)
    """Memory bandwidth of a copy, read plus write; 0 if it was not measured."""
    overhead_s: float = Field(default=0.0, ge=0, le=MOST_OVERHEAD_S)
    """Fixed time of one operation, such as a kernel launch; 0 if it was not measured."""
    peer_latency_s: float = Field(default=0.0, ge=0, le=MOST_LATENCY_S)
    """Time of the sum of a few numbers with the other devices of the machine; 0 if it was not measured."""
    peer_bytes_per_s: float = Field(default=0.0, ge=0, le=MOST_PER_S)
    """Size of a large tensor divided by the time of its sum with those devices; 0 if it was not measured."""

    @field_validator("flops_per_s")
    @classmethod
    def _speeds_are_possible(cls, value: dict[str, float]) -> dict[str, float]:
        for dtype, speed in value.items():
            if dtype not in DTYPES:
                guess = nearest(dtype, DTYPES)
                hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(DTYPES)}"
                raise ValueError(f"unknown dtype {dtype!r}; {hint}")
            if not 0 < speed <= MOST_PER_S:
                raise ValueError(f"{dtype} must be more than 0 and at most {MOST_PER_S:g}, not {speed:g}")
        if BASE_DTYPE not in value:
            raise ValueError(f"the speed in {BASE_DTYPE} is missing, which plans are made from; add it")
        return value


class ContributorEntry(_Entry):
    """One machine."""

    name: PlainText = Field(min_length=1, max_length=200)
    """Name for people; unique among the machines."""
    id: PlainText | None = Field(default=None, min_length=1, max_length=200)
    """Id that links refer to; default: its name."""
    address: PlainText = Field(default="", max_length=255)
    """IP address or other label of its host. Machines with the same address run on the same host."""
    cpu_threads: int = Field(default=1, ge=1, le=65536)
    """CPU threads that it computes with."""
    host: PlainText = Field(default="", max_length=255)
    """Label of the computer that it runs on; the CPUs of machines with the same label share its cores."""
    host_threads: int = Field(default=0, ge=0, le=65536)
    """Number of CPU threads of the computer ``host``; 0 if it is unknown, or enough for all its machines."""
    upload_bytes_per_s: float = Field(default=0.0, ge=0, le=MOST_PER_S)
    """Rate at which its owner lets it send; 0 for no limit. Its links are at most as fast as both of its limits."""
    download_bytes_per_s: float = Field(default=0.0, ge=0, le=MOST_PER_S)
    """Rate at which its owner lets it receive; 0 for no limit."""
    labels: Labels = Field(default_factory=dict)
    """Labels that its owner gives it, such as ``{site: paris}``; nobody verifies them."""
    # No min_length: with it, pydantic would report an invalid device as missing, too.
    devices: tuple[DeviceEntry, ...] = Field(json_schema_extra={"minItems": 1})
    """Devices of the machine that are lent together: those of the kind of the first GPU, or CPUs without a GPU. A job
    uses the first one, and with `parallelism.tensor: n` the first n."""

    @field_validator("devices")
    @classmethod
    def _has_a_device(cls, value: tuple[DeviceEntry, ...]) -> tuple[DeviceEntry, ...]:
        if not value:
            raise ValueError(
                "the machine has no device; give one, e.g. {memory_bytes: 16e9, flops_per_s: {float32: 2e11}}"
            )
        return value

    @property
    def key(self) -> str:
        """Return the id that links refer to."""
        return self.name if self.id is None else self.id


class LinkEntry(_Entry):
    """Measured path between two machines, or a machine and the head.

    One direction suffices. If a pair has several entries, the highest latency and the lowest bandwidth are used.
    """

    source: str
    """Id of a machine, or ``head``."""
    target: str
    """Id of a machine, or ``head``."""
    latency_s: float = Field(ge=0, le=MOST_LATENCY_S)
    """One-way latency."""
    bytes_per_s: float = Field(ge=0, le=MOST_PER_S)
    """Bandwidth; 0 if the path carries no data."""


class TopologyDocument(_Entry):
    """Machines and the measured links between them; the links of other pairs are estimated."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "kind": KIND,
                    "version": VERSION,
                    "contributors": [
                        {
                            "name": "desk",
                            "devices": [{"memory_bytes": 16e9, "flops_per_s": {"float32": 2e11}}],
                        }
                    ],
                    "links": [{"source": "desk", "target": HEAD, "latency_s": 0.001, "bytes_per_s": 1.1e8}],
                }
            ]
        }
    )

    kind: Literal["topology"] = "topology"
    version: Literal[1] = 1
    contributors: tuple[ContributorEntry, ...] = ()
    links: tuple[LinkEntry, ...] = ()
    """Measured links; a few suffice: from each machine to the head and to some others."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for what, given in (
            ("name", [machine.name for machine in self.contributors]),
            ("id", [machine.key for machine in self.contributors]),
        ):
            twice = [value for value, times in Counter(given).items() if times > 1]
            if twice:
                raise ValueError(f"contributors: two machines have the {what} {twice[0]!r}; rename one")
        if any(machine.key == HEAD for machine in self.contributors):
            raise ValueError(
                f"contributors: {HEAD!r} stands for the server in links; name the machine otherwise"
            )
        return self

    @model_validator(mode="after")
    def _links_lead_somewhere(self) -> Self:
        known = {machine.key for machine in self.contributors} | {HEAD}
        for index, link in enumerate(self.links):
            for end in (link.source, link.target):
                if end not in known:
                    raise ValueError(
                        f"links.{index}: there is no machine {end!r}; give the id of one, "
                        f"its name where it has no id, or {HEAD!r}"
                    )
            if link.source == link.target:
                raise ValueError(f"links.{index}: {link.source!r} is linked to itself; remove it")
        return self

    def topology(self) -> Topology:
        """Return the topology for the planner."""
        contributors = tuple(
            Contributor(
                id=machine.key,
                name=machine.name,
                devices=tuple(Device(**device.model_dump()) for device in machine.devices),
                cpu_threads=machine.cpu_threads,
                address=machine.address,
                host=machine.host,
                host_threads=machine.host_threads,
                upload_bytes_per_s=machine.upload_bytes_per_s,
                download_bytes_per_s=machine.download_bytes_per_s,
                labels=machine.labels,
            )
            for machine in self.contributors
        )
        links = (Link(**link.model_dump()) for link in self.links)
        return Topology(contributors, limited_links(contributors, links))


def check_kind(data: Any) -> dict[str, Any]:
    """Return ``data`` if it is a mapping of the kind topology in the supported version.

    Raises:
        UserError: the data is empty, not a mapping, of another kind, or not of the supported version.
    """
    if data is None:
        raise UserError("the topology is empty", hint=_EXAMPLE)
    if not isinstance(data, dict):
        raise UserError(f"a topology is a mapping of keys, not {type(data).__name__}", hint=_EXAMPLE)
    if data.get("kind") != KIND:
        found = f"is of kind {data['kind']!r}" if "kind" in data else "does not say its kind"
        raise UserError(
            f"the topology {found}; it needs kind: {KIND}",
            hint=f"give a topology, e.g. what `share-compute topology` writes; or {_EXAMPLE}",
        )
    version = data.get("version")
    if version is None:
        raise UserError("the topology's version is missing", hint=f"add version: {VERSION}")
    if isinstance(version, bool) or not isinstance(version, int):
        raise UserError(
            f"a topology's version is a whole number, not {version!r}", hint=f"write version: {VERSION}"
        )
    if version != VERSION:
        raise UserError(
            f"this topology is of version {version!r}; share-compute {__version__} reads version {VERSION}",
            hint="write it again with `share-compute topology` of this release, or use the release that wrote it",
            details={"version": version, "known_version": VERSION},
        )
    return data


def parse_topology(data: Any) -> Topology:
    """Read a topology from plain data.

    Raises:
        UserError: the data is not a topology of the supported version, or has invalid fields.
    """
    check_kind(data)
    try:
        return TopologyDocument.model_validate(data).topology()
    except ValidationError as failure:
        problems = field_errors(failure)
        named = [{**item, "field": _shown(item["field"], data)} for item in problems]
        raise UserError(
            fields_text(named, failure.error_count()),
            hint="fix these fields of the topology",
            details={"fields": problems},
        ) from failure


def read_topology(text: str) -> Topology:
    """Read a topology file, YAML or JSON.

    Raises:
        UserError: as in `parse_topology`, or the text is not valid YAML or JSON, or is YAML that is too long. The error
            has the line and column if they are known.
    """
    is_json = text.lstrip().startswith("{")
    if is_json:
        return parse_topology(read_json(text, "topology file"))
    return parse_topology(read_yaml(text, "topology file", _MOST_YAML_BYTES))


def describe_topology(topology: Topology) -> TopologyDocument:
    """Return the document that describes a topology.

    Devices without a measured float32 speed are left out. Machines without such a device are left out with their links.
    """
    measured = [machine for machine in topology.contributors if any(map(_is_measured, machine.devices))]
    known = {machine.id for machine in measured} | {HEAD}
    return TopologyDocument(
        contributors=tuple(
            ContributorEntry(
                name=machine.name,
                id=machine.id if machine.id != machine.name else None,
                address=machine.address,
                cpu_threads=machine.cpu_threads,
                host=machine.host,
                host_threads=machine.host_threads,
                upload_bytes_per_s=machine.upload_bytes_per_s,
                download_bytes_per_s=machine.download_bytes_per_s,
                labels=dict(machine.labels),
                devices=tuple(
                    DeviceEntry(
                        kind=device.kind,
                        name=plain(device.name),
                        memory_bytes=device.memory_bytes,
                        flops_per_s=device.flops_per_s,
                        memory_bytes_per_s=device.memory_bytes_per_s,
                        overhead_s=device.overhead_s,
                        peer_latency_s=device.peer_latency_s,
                        peer_bytes_per_s=device.peer_bytes_per_s,
                    )
                    for device in machine.devices
                    if _is_measured(device)
                ),
            )
            for machine in measured
        ),
        links=tuple(
            LinkEntry(
                source=link.source,
                target=link.target,
                latency_s=link.latency_s,
                bytes_per_s=link.bytes_per_s,
            )
            for link in topology.links
            if link.source in known and link.target in known
        ),
    )


def _is_measured(device: Device) -> bool:
    return BASE_DTYPE in device.flops_per_s


def write_topology(topology: Topology | TopologyDocument, form: Literal["yaml", "json"] = "yaml") -> str:
    """Return the text of a topology file that `read_topology` can read."""
    document = topology if isinstance(topology, TopologyDocument) else describe_topology(topology)
    data = {"kind": KIND, "version": VERSION, **document.model_dump(mode="json", exclude_defaults=True)}
    if form == "json":
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    return write_yaml(data)


def _shown(field: str, data: dict[str, Any]) -> str:
    """Return the path of a field, followed by the name of its machine or the ends of its link if they are known."""
    parts = field.split(".")
    if len(parts) < 2 or parts[0] not in ("contributors", "links"):
        return field
    try:
        entry = data[parts[0]][int(parts[1])]
        name = entry["name"] if parts[0] == "contributors" else f"{entry['source']} - {entry['target']}"
    except (LookupError, TypeError, ValueError):
        return field
    return f"{field} ({plain(str(name))})"
