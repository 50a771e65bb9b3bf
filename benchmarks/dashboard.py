"""Measure the load time of the dashboard, and its frame times with 1,000 machines and 500 jobs at 50 events/s.

A real server runs on loopback in a process of its own, with a store filled by a generator, and a real headless
Chromium loads its pages. The peers are goals: 250 kB for the first load, 1 s until the stage page is usable, no frame
over 100 ms. The page is loaded with three machines, as most people first see it, and with all of them. For loading,
Ray's own dashboard is a second peer. It is started and measured in the same run if its package is installed. No other
rival shows the same things.

Each page that changes with the events is measured: the map, an open island, the table, the list of jobs and the page
of one machine. Frames are measured with ``requestAnimationFrame``; the browser's own long tasks are reported, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing as mp
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _harness import print_figure
from playwright.sync_api import Browser, Page, sync_playwright

from share_compute.lifecycle.attempt_events import Measured, Planned, StageTiming, Started, StepCommitted
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import MemberPlan, Plan, StagePlan
from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.simulation.fleet_name import FleetName
from share_compute.simulation.fleets import make_fleet
from share_compute.specification import parse_job
from share_compute.store import ContributorRecord, JobRecord, Store, upgrade
from share_compute.topology import HEAD, Link

FIRST_LOAD_KB = 250.0
INTERACTIVE_MS = 1000.0
FRAME_MS = 100.0
MEMORY_MIB = 200.0
NEW_CLUSTER = {"machines": 3, "jobs": 4}
READY = "svg[role=group] a"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PRECISE = ["--enable-precise-memory-info", "--js-flags=--expose-gc"]
JOB = """
name: digits
model:
  layers:
    - {type: linear, options: {in_features: 64, out_features: 32}}
    - {type: relu}
    - {type: linear, options: {in_features: 32, out_features: 10}}
data: {dataset: digits}
training: {steps: 1000000, batch_size: 32, microbatches: 4}
"""
WATCH = """
() => {
  const seen = (window.seen = {frames: [], long: [], shift: 0, largest: 0, first: 0});
  let last = performance.now();
  const frame = (now) => { seen.frames.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  const observe = (type, take) => new PerformanceObserver((list) => list.getEntries().forEach(take))
    .observe({type, buffered: true});
  observe('longtask', (entry) => seen.long.push(entry.duration));
  observe('layout-shift', (entry) => { if (!entry.hadRecentInput) seen.shift += entry.value; });
  observe('largest-contentful-paint', (entry) => { seen.largest = entry.startTime; });
  observe('paint', (entry) => { if (entry.name === 'first-contentful-paint') seen.first = entry.startTime; });
}
"""


class Filled:
    """A store filled with machines and jobs, for which further events can be generated.

    Args:
        store: an empty store.
        machines: number of machines that join.
        jobs: number of jobs that are submitted; half of them run, on two machines each.
    """

    def __init__(self, store: Store, machines: int, jobs: int) -> None:
        self._store = store
        self._draw = random.Random(0)
        self._steps: dict[str, int] = {}
        self.machines = self._join(machines)
        self.jobs = [store.jobs.create(parse_job({**_spec(), "name": f"digits-{n}"})) for n in range(jobs)]
        free = iter(self.machines[: machines // 2])
        self._running = [
            self._start(job, [next(free), next(free)]) for job in self.jobs[: min(jobs, machines) // 4]
        ]
        self._restless = self.machines[machines // 2 :]

    def _join(self, count: int) -> list[ContributorRecord]:
        fleet = make_fleet(FleetName.mixed, count)
        ids: dict[str, str] = {HEAD: HEAD}
        joined = []
        for number, machine in enumerate(fleet.contributors):
            _, code = self._store.invites.create(label=f"owner {number % 40}")
            limits = {"memory_bytes": machine.memory_bytes, "cpu_threads": machine.cpu_threads, "gpus": 0}
            record, _ = self._store.contributors.join(
                code, name=f"machine-{number}", host=f"host-{number}.example", versions={}, limits=limits
            )
            ids[machine.id] = record.id
            joined.append((record, machine))
        ready: list[ContributorRecord] = []
        for record, machine in joined:
            self._store.contributors.online(
                record.id, node_id=f"{len(ready):056x}", address=machine.address or ""
            )
            links = [
                Link(ids[link.source], ids[link.target], link.latency_s, link.bytes_per_s)
                for link in fleet.links
                if link.source == machine.id
            ]
            ready.append(self._store.contributors.ready(record.id, capacity=machine.devices, links=links))
        return ready

    def _start(self, job: JobRecord, members: list[ContributorRecord]) -> tuple[JobRecord, list[str]]:
        begun = self._store.jobs.begin(job.id, [member.id for member in members])
        stages = tuple(
            StagePlan(
                start=place,
                stop=place + 1 if member is not members[-1] else 3,
                parameters=2_000,
                members=(
                    MemberPlan(
                        contributor_id=member.id,
                        name=member.name,
                        microbatches=(0, 1, 2, 3),
                        memory_bytes=1 << 28,
                        reason="its share by measured speed",
                    ),
                ),
            )
            for place, member in enumerate(members)
        )
        plan = Plan(epoch=0, strategy="joint", num_layers=3, parameters=4_000, stages=stages, microbatches=4)
        self._store.progress.record(
            job.id, begun.attempt, [Planned(plan=plan), Started(first_step=1, total_steps=1_000_000)]
        )
        return begun, [member.id for member in members]

    def happen(self) -> None:
        """Generate one event: mostly a step, sometimes a measurement, or a machine that leaves or comes back."""
        chance = self._draw.random()
        if chance < 0.08:
            record = self._store.contributors.get(self._draw.choice(self._restless).id)
            if record.state is ContributorState.ready:
                self._store.contributors.set_state(record, ContributorState.lost, "its Ray node died")
            elif record.state is ContributorState.lost:
                self._store.contributors.rejoin(record.id)
            elif record.state is ContributorState.joining:
                self._store.contributors.online(
                    record.id, node_id=record.id.encode().hex(), address="192.0.2.7"
                )
            else:
                self._store.contributors.ready(
                    record.id, capacity=record.capacity or (), links=record.links or ()
                )
            return
        job, members = self._draw.choice(self._running)
        step = self._steps[job.id] = self._steps.get(job.id, 0) + 1
        event: StepCommitted | Measured = StepCommitted(
            step=step,
            loss=2.3 / (1 + step),
            learning_rate=0.001,
            gradient_norm=1.0,
            samples=32,
            tokens=32,
            seconds=0.1,
            tokens_per_s=320.0,
        )
        if chance < 0.15:
            busy = {member: self._draw.random() for member in members}
            timings = tuple(StageTiming(predicted_busy_s=None, measured_busy_s=s) for s in busy.values())
            event = Measured(
                step=step, predicted_step_s=None, measured_step_s=1.0, stages=timings, machines=busy
            )
        self._store.progress.record(job.id, job.attempt, [event])


def _spec() -> dict[str, Any]:
    import yaml

    spec: dict[str, Any] = yaml.safe_load(JOB)
    return spec


def serve(end: Connection, folder: Path, machines: int, jobs: int) -> None:
    """Fill a store, serve it, and generate events at the rate received through the pipe, until the pipe is closed."""
    import uvicorn

    from share_compute_api.app.app import create_app, end_streams

    settings = Settings(data_folder=folder)
    upgrade(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    filled = Filled(store, machines, jobs)
    app = create_app(settings, store, cluster=None)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    port = listener.getsockname()[1]
    while not server.started:
        time.sleep(0.01)
    end.send((port, store.keys.create("benchmark", [Scope.admin])[1], filled.machines[0].id))
    rate, sent, due = 0.0, 0, time.monotonic()
    while True:
        wait = max(0.0, due - time.monotonic()) if rate else None
        if end.poll(wait):
            try:
                rate = end.recv()
            except EOFError:
                break
            end.send(sent)
            sent, due = 0, time.monotonic()
            continue
        filled.happen()
        sent += 1
        # Events that the machine was too slow for are not made up for in a burst.
        due = max(due + 1 / rate, time.monotonic() - 0.2)
    end_streams(app)
    server.should_exit = True
    thread.join()
    store.close()


@contextmanager
def served(machines: int, jobs: int) -> Iterator[tuple[Connection, str, str, str]]:
    """Serve a filled store in a process of its own; yield the pipe for its event rate, its URL, a key and a machine."""
    context = mp.get_context("spawn")
    end, other = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(other, Path(folder), machines, jobs))
        process.start()
        other.close()
        try:
            port, key, machine = end.recv()
            yield end, f"http://127.0.0.1:{port}", key, machine
        finally:
            end.close()
            process.join(timeout=30)


@contextmanager
def ray_dashboard() -> Iterator[str | None]:
    """Start Ray's own dashboard and yield its URL; None if it does not start."""
    if (
        importlib.util.find_spec("aiohttp_cors") is None
    ):  # it is part of ray[default], which the product does not need
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    begin = [str(ray), "start", "--head", "--port=0", "--include-dashboard=true", "--num-cpus=1"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    process = subprocess.Popen(
        [
            *begin,
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={port}",
            "--disable-usage-stats",
            "--block",
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/"
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(OSError, urllib.error.URLError):
                if b"<script" in urllib.request.urlopen(url, timeout=5).read():
                    yield url
                    return
            time.sleep(0.5)
        yield None
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)


def load(browser: Browser, url: str, ready: str) -> dict[str, float]:
    """Open a page with an empty cache; return the times until ``ready`` was present and the page responded."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    sizes: dict[str, float] = {}
    kinds: dict[str, str] = {}
    session.on(
        "Network.responseReceived", lambda event: kinds.update({event["requestId"]: event["response"]["url"]})
    )
    session.on(
        "Network.loadingFinished",
        lambda event: sizes.update({event["requestId"]: event["encodedDataLength"]}),
    )
    page.add_init_script(f"({WATCH})()")
    page.add_init_script(
        f"""(() => {{
          const check = () => {{
            if (document.querySelector({json.dumps(ready)}) !== null) {{
              // It is usable when it has been drawn and a task gets its turn.
              requestAnimationFrame(() => setTimeout(() => {{
                window.usable = performance.now();
                document.documentElement.dataset.usable = "";
              }}));
            }} else requestAnimationFrame(check);
          }};
          check();
        }})()"""
    )
    page.goto(url)
    page.locator("html[data-usable]").wait_for(timeout=60_000)
    page.wait_for_timeout(1500)
    figures: dict[str, float] = page.evaluate(
        """() => ({
          interactive_ms: window.usable,
          first_contentful_paint_ms: window.seen.first,
          largest_contentful_paint_ms: window.seen.largest,
          layout_shift: window.seen.shift,
          total_blocking_ms: window.seen.long.reduce((sum, one) => sum + Math.max(0, one - 50), 0),
        })"""
    )
    data = sum(size for key, size in sizes.items() if "/api/" in kinds.get(key, ""))
    figures |= {"all_kb": sum(sizes.values()) / 1000, "data_kb": data / 1000}
    context.close()
    return figures


def watch(page: Page, end: Connection, seconds: float, rate: float) -> dict[str, float]:
    """Generate events for some seconds; return the frame times of a page meanwhile."""
    page.wait_for_timeout(1000)
    end.send(rate)
    end.recv()
    page.wait_for_timeout(1000)
    page.evaluate("() => { window.seen.frames.length = 0; window.seen.long.length = 0; }")
    page.wait_for_timeout(seconds * 1000)
    frames, long = page.evaluate("() => [window.seen.frames, window.seen.long]")
    end.send(0.0)
    sent = end.recv()
    page.evaluate("() => window.gc && window.gc()")
    memory = page.evaluate("() => performance.memory ? performance.memory.usedJSHeapSize : 0")
    ordered = sorted(frames)
    return {
        "longest_ms": ordered[-1],
        "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "frames": len(frames),
        "longest_task_ms": max(long, default=0.0),
        "events_per_s": sent / (seconds + 1),
        "memory_mib": memory / 2**20,
    }


def watch_pages(
    browser: Browser,
    url: str,
    key: str,
    machine: str,
    end: Connection,
    options: argparse.Namespace,
    size: dict[str, int],
) -> None:
    """Measure each page that changes with the events, and print its frame times."""
    pages = {"map": "/", "table": "/?view=table", "jobs": "/jobs", "machine": f"/machines/{machine}"}
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.add_init_script(f"({WATCH})()")
    page.goto(f"{url}/#key={key}")
    first = page.locator("svg[role=group] a").first
    first.wait_for()
    island = first.get_attribute("href") or ""
    if "island" in island:
        pages["island"] = island
    for name, path in pages.items():
        page.goto(url + path)
        page.get_by_role("heading", level=1).wait_for()
        seen = watch(page, end, options.seconds, options.rate)
        more = {key: round(value, 1) for key, value in seen.items() if key != "longest_ms"}
        print_figure(
            f"dashboard_longest_frame_{name}",
            ours=seen["longest_ms"],
            peer=FRAME_MS,
            peer_name="goal",
            ratio=FRAME_MS / seen["longest_ms"],
            unit="ms",
            **more,
            **size,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 machines, 20 jobs, 3 s a page, no rival")
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0, help="events a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each page is watched")
    parser.add_argument("--loads", type=int, default=5, help="times that the page is loaded")
    options = parser.parse_args()
    if options.quick:
        options.machines, options.jobs, options.seconds, options.loads = 60, 20, 3.0, 2
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium here")
    size = {"machines": options.machines, "jobs": options.jobs}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=[*FLAGS, *PRECISE])
        rival = None
        if not options.quick:
            with ray_dashboard() as address:
                if address is not None:
                    rival = loads(
                        browser, address, "#root nav, #root header, #root [role=tab]", options.loads
                    )
        with served(**NEW_CLUSTER) as (_, url, key, _):
            tell_loads(loads(browser, f"{url}/#key={key}", READY, options.loads), rival, NEW_CLUSTER)
        with served(**size) as (end, url, key, machine):
            tell_loads(loads(browser, f"{url}/#key={key}", READY, options.loads), rival, size)
            watch_pages(browser, url, key, machine, end, options, size)
        browser.close()


def loads(browser: Browser, url: str, ready: str, times: int) -> dict[str, float]:
    """Return the medians of several loads without the first one, which warms up the server."""
    seen = [load(browser, url, ready) for _ in range(times + 1)][1:]
    return {name: statistics.median(one[name] for one in seen) for name in seen[0]}


def tell_loads(ours: dict[str, float], rival: dict[str, float] | None, size: dict[str, int]) -> None:
    """Print the costs of loading, compared with the goals and the rival."""
    beside = {f"ray_dashboard_{name}": round(value, 2) for name, value in (rival or {}).items()}
    if rival is None:
        beside["ray_dashboard"] = (
            "not measured: it does not come up here without the packages of ray[default]"  # type: ignore[assignment]
        )
    more = {name: round(value, 3) for name, value in ours.items()}
    for figure, value, goal, unit in (
        ("dashboard_first_load_kb", ours["all_kb"], FIRST_LOAD_KB, "kB"),
        ("dashboard_interactive_ms", ours["interactive_ms"], INTERACTIVE_MS, "ms"),
    ):
        print_figure(
            figure,
            ours=value,
            peer=goal,
            peer_name="goal",
            ratio=goal / value,
            unit=unit,
            **more,
            **beside,
            **size,
        )


if __name__ == "__main__":
    main()
