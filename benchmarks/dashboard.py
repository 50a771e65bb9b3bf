"""Measure the load time of the dashboard, and its frame times with 1,000 machines and 500 jobs at 50 events/s.

A real server runs on loopback in a process of its own, with a store filled by a generator, and a real headless
Chromium loads its pages. The page is loaded with three machines, as most people first see it, and with all of them.
The peers are goals: 250 kB for the first load, 1 s until the map of three machines is usable and 1.2 s for all, no
frame over 50 ms. For loading, Ray's own dashboard is a second peer. It is started and measured in the same run if its
package is installed. No other rival shows the same things.

Each page that changes with the events is measured: the map, an open island, the table, the utilization, the list of
jobs, the page of a machine, and the page of a job that plays its step. With each event a machine reports its
utilization. Frames are measured with ``requestAnimationFrame``; the browser's own long tasks are reported, too. With
``--soak`` pages are watched for longer, by default the map and the page of the job. The goal is that their memory grows
by at most 5% per hour.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing as mp
import os
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

from _harness import print_figure
from playwright.sync_api import Browser, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.e2e.filled import Filled

from share_compute.scopes import Scope
from share_compute.settings import Settings
from share_compute.store import Store, upgrade

FIRST_LOAD_KB = 250.0
INTERACTIVE_MS = 1000.0
INTERACTIVE_MANY_MS = 1200.0
FRAME_MS = 50.0
GROWTH_PER_HOUR = 0.05
NEW_CLUSTER = {"machines": 3, "jobs": 4}
READY = "svg[role=group] a"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
PRECISE = ["--enable-precise-memory-info", "--js-flags=--expose-gc"]
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


def serve(end: Connection, folder: Path, machines: int, jobs: int) -> None:
    """Fill a store, serve it, and generate events at the rate received through the pipe, until the pipe is closed."""
    import uvicorn

    from share_compute_api.app.app import create_app, end_streams

    settings = Settings(data_folder=folder)
    upgrade(settings.resolved_database_url)
    store = Store(settings.resolved_database_url)
    filled = Filled(store, machines, jobs)
    app = create_app(settings, store, cluster=None)
    monitor = app.state.context.utilization
    filled.use(monitor)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    port = listener.getsockname()[1]
    while not server.started:
        time.sleep(0.01)
    end.send(
        (port, store.keys.create("benchmark", [Scope.admin])[1], filled.machines[0].id, filled.jobs[0].id)
    )
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
        filled.report(monitor)
        sent += 1
        # Events that the machine was too slow for are not made up for in a burst.
        due = max(due + 1 / rate, time.monotonic() - 0.2)
    end_streams(app)
    server.should_exit = True
    thread.join()
    store.close()


@contextmanager
def served(machines: int, jobs: int) -> Iterator[tuple[Connection, str, str, dict[str, str]]]:
    """Serve a filled store in a process of its own.

    Yields:
        the pipe for the rate of its events, its URL, a key, and the paths of pages to watch by name.
    """
    context = mp.get_context("spawn")
    end, other = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=serve, args=(other, Path(folder), machines, jobs))
        process.start()
        other.close()
        try:
            port, key, machine, job = end.recv()
            pages = {
                "map": "/",
                "table": "/?view=table",
                "utilization": "/?view=use",
                "jobs": "/jobs",
                "machine": f"/machines/{machine}",
                "job": f"/jobs/{job}?part=step",
            }
            yield end, f"http://127.0.0.1:{port}", key, pages
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


def open_page(browser: Browser, url: str, key: str) -> Page:
    """Sign in and return the page with the map."""
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.add_init_script(f"({WATCH})()")
    page.goto(f"{url}/#key={key}")
    page.locator(READY).first.wait_for()
    return page


def show(page: Page, address: str) -> None:
    """Open an address of the dashboard and wait for its content, also for the line that plays a step."""
    page.goto(address)
    page.get_by_role("heading", level=1).wait_for()
    if "part=step" in address:
        page.locator("[class*='_playhead_']").wait_for(state="attached", timeout=180_000)


def watch_pages(
    page: Page, url: str, pages: dict[str, str], end: Connection, options: argparse.Namespace, **size: int
) -> None:
    """Measure each page that changes with the events, and print its frame times."""
    island = page.locator(READY).first.get_attribute("href") or ""
    for name, path in {**pages, **({"island": island} if "island" in island else {})}.items():
        show(page, url + path)
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


def soak(page: Page, address: str, name: str, end: Connection, seconds: float, rate: float) -> None:
    """Watch a page for a long time, and print how its used memory grows."""
    show(page, address)
    times, sizes = [], []
    begun = time.monotonic()
    # The first minute, in which the page loads its data, is left out.
    while (elapsed := time.monotonic() - begun) < seconds + 60:
        seen = watch(page, end, min(20.0, seconds), rate)
        if elapsed >= 60:
            times.append((time.monotonic() - begun) / 3600)
            sizes.append(seen["memory_mib"])
    slope, start = statistics.linear_regression(times, sizes)
    growth = slope / (start + slope * times[0])
    print_figure(
        f"dashboard_memory_growth_{name}",
        ours=growth,
        peer=GROWTH_PER_HOUR,
        peer_name="goal",
        ratio=GROWTH_PER_HOUR / growth if growth > 0 else float("inf"),
        unit="1/h",
        mib_per_hour=round(slope, 2),
        first_mib=round(sizes[0], 1),
        last_mib=round(sizes[-1], 1),
        largest_mib=round(max(sizes), 1),
        seconds=round(seconds),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="60 machines, 20 jobs, 3 s a page, no rival")
    parser.add_argument("--machines", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0, help="events a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each page is watched")
    parser.add_argument(
        "--soak", type=float, default=0.0, help="seconds in which the memory of each page is watched"
    )
    parser.add_argument(
        "--soak-on", nargs="+", default=["map", "job"], help="names of the pages whose memory is watched"
    )
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
        with served(**size) as (end, url, key, pages):
            tell_loads(loads(browser, f"{url}/#key={key}", READY, options.loads), rival, size)
            page = open_page(browser, url, key)
            watch_pages(page, url, pages, end, options, **size)
            for name in options.soak_on if options.soak else ():
                soak(page, url + pages[name], name, end, options.soak, options.rate)
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
    interactive_ms = INTERACTIVE_MS if size == NEW_CLUSTER else INTERACTIVE_MANY_MS
    for figure, value, goal, unit in (
        ("dashboard_first_load_kb", ours["all_kb"], FIRST_LOAD_KB, "kB"),
        ("dashboard_interactive_ms", ours["interactive_ms"], interactive_ms, "ms"),
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
