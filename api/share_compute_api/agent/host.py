"""A host that lends several devices: starts, watches and ends one agent process for each device."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from share_compute.labels import label_texts
from share_compute_actors.machine.cores import on_cores, share_cores
from share_compute_actors.machine.processes import Child, ChildProcesses
from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder
from share_compute_api.agent.agent import Agent, AgentStatus
from share_compute_api.agent.joining import JoinOptions, resolve_limits
from share_compute_api.agent.systemd import GRACE_S, RETRY_S
from share_compute_api.connection.identity import Identities
from share_compute_api.schemas.agents import ContributedWork, ContributorWork
from share_compute_api.schemas.utilization import Utilization
from share_compute_api.terminal.children import Interrupts, own_command

FINAL = (0, 2, 5)
"""Exit codes after which an agent is not restarted: it left, its options are wrong, or the server refused it."""
_POLL_S = 0.5


def enroll(
    devices: Sequence[JoinOptions], report: Callable[[AgentStatus], None], identities: Identities, host: str
) -> None:
    """Add all devices of a host to the cluster, before an agent process is started for each device.

    If there is an invite, the first device joins with it, or rejoins if it has joined with this invite before. The
    other devices then join as new contributors with the first device's key. If there is no invite, each device without
    a stored key joins with the key of another device of this host. Devices that have a stored key are skipped.

    Args:
        devices: options of this host's devices; all have the same invite.
        report: called with the state of each device.
        identities: store of the keys.
        host: name of the host.

    Raises:
        ShareComputeError: a device cannot join; earlier devices in the sequence have joined.
    """
    invite = devices[0].invite
    known = None if invite else identities.of_host(devices[0].url, host)
    for device in devices:
        if invite is None and identities.find(device.url, device.name) is not None:
            continue
        with identities.in_use(device.url, device.name):
            joined, _ = Agent(device, report, identities).enroll(resolve_limits(device), known)
            known = known or joined


@dataclass(slots=True)
class _Device:
    """A device, or several that are lent together, and their agent process."""

    options: JoinOptions
    cores: tuple[int, ...]
    view: AgentStatus
    child: Child | None = None
    status: int | None = None
    """Exit code of the agent; None while the agent runs or will be started again."""
    starts_at: float = 0.0
    """Time on the monotonic clock at which the agent is started, if it is not running."""


class Host:
    """A host that lends several devices until Ctrl-C, SIGTERM, or the end of all agents.

    Args:
        devices: options of each device.
        report: called with the state of a device whenever it changes.
        identities: store of the keys.
        name: name of the host.
    """

    def __init__(
        self,
        devices: Sequence[JoinOptions],
        report: Callable[[AgentStatus], None],
        identities: Identities,
        name: str,
    ) -> None:
        now = datetime.now(UTC)
        self._devices = [
            _Device(
                options,
                cores,
                AgentStatus(options.name, options.url, "waiting", now, lent=resolve_limits(options)),
            )
            for options, cores in zip(devices, _cores(devices), strict=True)
        ]
        self._report = report
        self._identities = identities
        self._name = name
        self._printed: queue.SimpleQueue[tuple[_Device, str | None]] = queue.SimpleQueue()
        """Output lines of the agents; None marks the end of an agent's output."""
        self._is_leaving = False

    def run(self) -> int:
        """Join with all devices and lend them; return the exit code of the first device whose agent failed, else 0.

        Raises:
            ShareComputeError: a device could not join.
        """
        options = [device.options for device in self._devices]
        with Interrupts() as interrupts, ExitStack() as stack:
            stack.callback(interrupts.begin_stopping)
            children = open_run_folder(f"host {options[0].url} {self._name}")
            stack.callback(close_run_folder, children)
            interrupts.takes_along(children)
            enroll(options, self._report, self._identities, self._name)
            try:
                self._follow(children)
            finally:
                interrupts.begin_stopping()
                self._leave(children)
        return next((device.status for device in self._devices if device.status), 0)

    def _follow(self, children: ChildProcesses, deadline: float = float("inf")) -> None:
        """Report the agents' output and start agents when due, until all have ended or the deadline has passed."""
        while time.monotonic() < deadline and any(device.status is None for device in self._devices):
            for device in self._devices:
                if device.child is None and device.status is None and time.monotonic() >= device.starts_at:
                    self._start(children, device)
            try:
                device, line = self._printed.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if line is None:
                self._ended(device)
            elif line.startswith("{") and line.endswith("}\n"):  # a killed agent may leave an incomplete line
                self._show(device, line)

    def _leave(self, children: ChildProcesses) -> None:
        """Ask all agents to leave at the same time, and report their progress."""
        self._is_leaving = True
        for device in self._devices:
            if device.child is None:
                device.status = device.status or 0
            else:
                device.child.interrupt()
        longest_s = max(device.options.leave_within_s for device in self._devices)
        self._follow(children, time.monotonic() + longest_s + GRACE_S)
        for device in self._devices:
            if device.status is None:  # this agent did not end in time; `close_run_folder` ends it
                device.status = 1

    def _start(self, children: ChildProcesses, device: _Device) -> None:
        reading, writing = os.pipe()
        options = device.options
        given = {
            "--name": options.name,
            "--device": options.device.name,
            "--memory": options.memory_bytes,
            "--cpu-threads": options.cpu_threads,
            "--upload-limit": _rate(options.upload_bytes_per_s),
            "--download-limit": _rate(options.download_bytes_per_s),
            "--address": options.address,
            "--fingerprint": options.fingerprint,
            "--port-range": options.port_range,
            "--leave-within": options.leave_within_s,
        }
        words = [
            word for option, value in given.items() if value is not None for word in (option, str(value))
        ]
        labels = [word for text in label_texts(options.labels) for word in ("--label", text)]
        insecure = ["--insecure"] if options.is_insecure else []
        command = own_command("join", options.url, *words, *labels, *insecure, "--json")
        try:
            device.child = children.start(
                options.name, on_cores(command, device.cores), environment={}, output=writing
            )
        finally:
            os.close(writing)
        threading.Thread(target=self._read, args=(device, reading), name=options.name, daemon=True).start()

    def _read(self, device: _Device, reading: int) -> None:
        with closing(os.fdopen(reading, encoding="utf-8", errors="replace")) as lines:
            for line in lines:
                self._printed.put((device, line))
        self._printed.put((device, None))

    def _show(self, device: _Device, line: str) -> None:
        printed = json.loads(line)
        device.view = replace(
            device.view,
            phase=printed["phase"],
            contributor_id=printed["contributor_id"],
            work=ContributorWork.model_validate(printed["work"]) if printed["work"] else None,
            utilization=Utilization.model_validate(printed["utilization"])
            if printed["utilization"]
            else None,
            contributed=ContributedWork.model_validate(printed["contributed"])
            if printed["contributed"]
            else None,
            warnings=tuple(printed["warnings"]),
        )
        self._report(device.view)

    def _ended(self, device: _Device) -> None:
        assert device.child is not None
        status, why = device.child.wait(), _last_error(device.child)
        device.child = None
        if status in FINAL or self._is_leaving:
            device.status = status
        else:
            device.starts_at = time.monotonic() + RETRY_S
        if status != 0:
            again = "" if device.status is not None else f"; it is started again in {RETRY_S} s"
            device.view = replace(
                device.view, phase=f"its agent ended with {status}: {why}{again}", work=None
            )
            self._report(device.view)


def _cores(devices: Sequence[JoinOptions]) -> list[tuple[int, ...]]:
    """Return the processors of each contributor: those of all its devices."""
    parts = iter(share_cores(sum(len(each.device.names) for each in devices)))
    return [tuple(core for _ in each.device.names for core in next(parts)) for each in devices]


def _rate(bytes_per_s: int | None) -> str | None:
    return None if bytes_per_s is None else f"{bytes_per_s}B"


def _last_error(child: Child) -> str:
    """Return the last error that an agent printed, with its hint."""
    try:
        error = json.loads(child.log_tail(1))["error"]
        return f"{error['detail']}: {error['hint']}" if error.get("hint") else str(error["detail"])
    except (ValueError, KeyError, TypeError):
        return child.last_words()
