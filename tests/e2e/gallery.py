"""Take a picture of every page in every state, colour scheme, width and language, and report what is wrong with them.

``python -m tests.e2e.gallery FOLDER`` writes the pictures as ``FOLDER/STATE/PAGE-LANGUAGE-SCHEME-WIDTH.png``. It ends
with status 1, and lists the findings, if axe finds a violation, a page is wider than the window, a page does not load,
or the browser's console has an error. Needs Chromium and the built dashboard; takes about 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import Browser, BrowserContext, Error, Page, sync_playwright
from tests.api.conftest import wait_until
from tests.e2e import scenes, test_cluster, test_job, test_operations, test_results, test_runs, test_sweep
from tests.e2e.accessibility import LOCALES, violations
from tests.e2e.conftest import FLAGS, Cluster, Complaints, open_cluster
from tests.e2e.filled import Filled
from tests.e2e.talking import TalkingServer, make_model
from tests.e2e.test_talk import deploy

from share_compute.lifecycle.attempt_events import LinkBytes, Reformed, Sampled, TrafficMeasured
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState

Pages = dict[str, str]
"""Path of each page by the name of its picture."""

COMPACT = "compact"
"""Pages whose name begins so are shown with compact tables and cards."""
SIGN_IN = "sign-in"
ALWAYS = {
    "machines": "",
    "table": "?view=table",
    "utilization": "?view=use",
    "jobs": "jobs",
    "admin": "admin",
}
REPORT_S = 30.0
SWITCH_MS = 400
PLAYED = "[class*='_playhead_']"


def empty(cluster: Cluster) -> Pages:
    """Leave the cluster without machines and jobs."""
    del cluster
    others = ("submit", "models", "playground", "compare", "invites", "nowhere")
    return {SIGN_IN: "", **ALWAYS, **{name: name for name in others}}


def working(cluster: Cluster) -> Pages:
    """Let three machines train and a fourth one serve, beside finished jobs of all kinds."""
    store = cluster.store
    machines = test_job.machines(store, "ash", "birch", "cedar")
    apart = store.jobs.create(scenes.branched())
    scenes.start_branches(store, apart, [[machine] for machine in machines])
    scenes.train(store, apart, 1, 10)
    scenes.merge(store, apart, 1)
    scenes.merge(store, apart, 2, missing=(2,))
    scenes.finish(store, apart, cluster.folder / "jobs" / apart.id / "artifacts" / "model")
    job = store.jobs.create(scenes.digits())
    scenes.start(store, job, machines)
    plan = test_job.laid(1, *([machine] for machine in machines))
    test_job.tell(
        store,
        job,
        Reformed(epoch=1, step=1, plan=plan, seconds=0, recomputed=0, sentence="members connected again"),
    )
    scenes.train(store, job, 1, 10)
    test_cluster.time_it(store, job, machines)
    sent = LinkBytes(sent_bytes=4_000_000, received_bytes=1_000_000)
    test_job.tell(
        store, job, TrafficMeasured(step=10, machines={machine.id: sent for machine in machines}),
        Sampled(step=10, prompt="The sea", text=" is wide"),
    )  # fmt: skip
    for machine, busy in zip(machines, (0.95, 0.5, 0.1), strict=True):
        scenes.use(cluster.server.utilization, store, machine, busy)
    finished = test_runs.three(store)
    batch, tasks, sweep = test_job.batch(cluster), test_results.several(store), test_sweep.begun(store)
    test_job.machines(store, "doug")
    deploy(cluster, "poet", make_model(cluster.folder.parent / "poet"))
    wait_until(lambda: store.deployments.list()[0].state is DeploymentState.ready)
    store.invites.create("laptop of Grace")
    running = f"jobs/{job.id}"
    return {
        **ALWAYS,
        **{f"{COMPACT}-{name}": ALWAYS[name] for name in ("table", "utilization", "jobs", "admin")},
        "machine": f"machines/{machines[0].id}",
        f"{COMPACT}-machine": f"machines/{machines[0].id}",
        "groups": "jobs?by=state&sort=-loss",
        "job-step": f"{running}?part=step&smooth=0.5",
        "job-plan": f"{running}?part=plan",
        "job-samples": f"{running}?part=samples",
        f"{COMPACT}-job": running,
        "job-rounds": f"jobs/{apart.id}?part=rounds",
        "job-results": f"jobs/{tasks.id}?part=results",
        "job-succeeded": f"jobs/{finished[0]}",
        "batch": f"jobs/{batch.id}",
        "sweep": f"jobs/{sweep.id}",
        "compare": f"compare?jobs={','.join(finished)}",
        "submit": "submit",
        "submit-yaml": "submit?view=yaml",
        "submit-from": f"submit?from={job.id}",
        "models": "models",
        "deploy": "models?new=true",
        "deployment": "deployments/poet",
        "playground": "playground?with=poet",
        "invites": "invites",
    }


def crowded(machines: int) -> Callable[[Cluster], Pages]:
    """Return a state with so many machines, half of which train."""

    def prepare(cluster: Cluster) -> Pages:
        filled = Filled(cluster.store, machines, machines // 2)
        filled.use(cluster.server.utilization)
        for _ in range(200):
            filled.happen()
        overview = f"{cluster.url}/api/v1/cluster"
        with httpx.Client(headers={"Authorization": f"Bearer {cluster.key}"}) as client:
            wait_until(lambda: client.get(overview).json()["islands"]["is_current"])
        return {
            **ALWAYS,
            "machine": f"machines/{filled.machines[0].id}",
            "job": f"jobs/{filled.jobs[0].id}?part=plan",
        }

    return prepare


def dead(cluster: Cluster) -> Pages:
    """Lose one of six machines on two islands while it trains; another one has other versions than the server."""
    machines = test_cluster.two_islands(cluster.store)
    test_operations.join_as(cluster.store, "gum", torch="1.0.0")
    job = cluster.store.jobs.create(scenes.digits())
    scenes.start(cluster.store, job, machines[:3])
    scenes.train(cluster.store, job, 1, 10)
    for machine in machines:
        scenes.use(cluster.server.utilization, cluster.store, machine, 0.7)
    lost = cluster.store.contributors.get(machines[1].id)
    cluster.store.contributors.set_state(
        lost, ContributorState.lost, "its Ray node is dead or does not answer"
    )
    return {
        **ALWAYS,
        "machines-gone": "?gone=true",
        "table-gone": "?view=table&gone=true",
        "machine": f"machines/{lost.id}",
        "job": f"jobs/{job.id}",
    }


def failed(cluster: Cluster) -> Pages:
    """Fail a job by the loss of a machine, and let another one wait."""
    job, machines = test_job.running(cluster, "ash", "birch")
    scenes.lose(cluster.store, job, machines[1])
    waiting = cluster.store.jobs.create(scenes.digits())
    cluster.store.jobs.explain(waiting.id, "waiting for contributors: needs 4, 1 is ready")
    return {
        "machines": "", "jobs": "jobs", "admin": "admin", "job": f"jobs/{job.id}", "job-waiting": f"jobs/{waiting.id}",
        "submit-from": f"submit?from={job.id}",
    }  # fmt: skip


STATES: dict[str, Callable[[Cluster], Pages]] = {
    "empty": empty,
    "working": working,
    "forty": crowded(40),
    "thousand": crowded(1000),
    "dead": dead,
    "failed": failed,
}


@contextmanager
def opened(state: str) -> Iterator[tuple[Cluster, Pages]]:
    """Serve a cluster in this state; yield it with its pages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        with open_cluster(folder, TalkingServer) as cluster:
            yield cluster, STATES[state](cluster)


def report(cluster: Cluster) -> None:
    """Let all machines that are there report again: a heartbeat, and the utilization that they reported before."""
    store, monitor = cluster.store, cluster.server.utilization
    for machine in store.contributors.list():
        if machine.state is ContributorState.ready:
            store.heartbeats.note(machine.id)
        if samples := monitor.history(machine.id).samples:
            monitor.add(machine.id, samples[-1], store.clock())


def show(page: Page, name: str, address: str) -> None:
    """Open a page and wait until all of it is there."""
    page.evaluate(
        "density => localStorage.setItem('share-compute.density', density)",
        "compact" if name.startswith(COMPACT) else "comfortable",
    )
    page.goto(address)
    page.get_by_role("heading", level=1).first.wait_for()
    page.wait_for_function("() => document.querySelector('.mantine-Skeleton-root') === null", timeout=180_000)
    if "part=step" in address:
        page.locator(PLAYED).wait_for(state="attached", timeout=180_000)
    if name == "playground" and "with=" in address:
        page.locator("textarea:visible").last.fill("Sing of the sea.")
        page.keyboard.press("Enter")
        page.get_by_test_id("answer").last.wait_for()
        page.wait_for_timeout(3000)
    page.wait_for_timeout(600)  # transitions


def look(
    context: BrowserContext, cluster: Cluster, pages: Pages, schemes: Sequence[Any], pictures: str
) -> Iterator[str]:
    """Take a picture of each page in each colour scheme; yield what is wrong.

    The scheme changes while the page is open, as it does at sunset: a page is loaded once, and its charts draw again.
    """
    said = Complaints()
    page = context.new_page()
    said.listen(page)
    is_signed_in, reported_s = False, 0.0
    for name, path in pages.items():
        if time.monotonic() - reported_s > REPORT_S:
            report(cluster)
            reported_s = time.monotonic()
        picture = pictures.format(name, schemes[0])
        try:
            page.emulate_media(color_scheme=schemes[0])
            if name == SIGN_IN:
                page.goto(cluster.url)
                page.locator("input").first.wait_for()
            else:
                if not is_signed_in:
                    page.goto(f"{cluster.url}/#key={cluster.key}")
                    page.get_by_role("heading", level=1).first.wait_for()
                    is_signed_in = True
                show(page, name, f"{cluster.url}/{path}")
            for scheme in schemes:
                picture = pictures.format(name, scheme)
                if scheme != schemes[0]:
                    page.emulate_media(color_scheme=scheme)
                    page.wait_for_timeout(SWITCH_MS)
                page.screenshot(path=picture, full_page=True)
                yield from (f"{picture}: {one}" for one in violations(page))
            if not page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
                yield f"{picture}: wider than the window"
        except Error as error:
            yield f"{picture}: {error.message.splitlines()[0]}"
        yield from (f"{picture}: console: {one}" for one in said)
        said.clear()


def take(browser: Browser, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Take all chosen pictures; yield what is wrong."""
    for state in options.states:
        (folder / state).mkdir(parents=True, exist_ok=True)
        with opened(state) as (cluster, pages):
            chosen = {name: path for name, path in pages.items() if re.search(options.pages, name)}
            for language, width in product(options.languages, options.widths):
                is_phone = width < 600
                context = browser.new_context(
                    locale=LOCALES[language],
                    viewport={"width": width, "height": 900},
                    is_mobile=is_phone,
                    has_touch=is_phone,
                )
                pictures = str(folder / state / f"{{}}-{language}-{{}}-{width}.png")
                yield from look(context, cluster, chosen, options.schemes, pictures)
                context.close()


def main() -> None:
    """Take the chosen pictures, and end with a list of what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--pages", default="", help="regular expression for the names of pages")
    parser.add_argument("--languages", nargs="+", choices=LOCALES, default=list(LOCALES))
    parser.add_argument("--schemes", nargs="+", choices=("light", "dark"), default=["light", "dark"])
    parser.add_argument("--widths", nargs="+", type=int, default=[1440, 390])
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    wrong = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for one in take(browser, options.folder, options):
            wrong.append(one)
            sys.stderr.write(f"{one}\n")
        browser.close()
    if wrong:
        sys.exit(f"{len(wrong)} findings")


if __name__ == "__main__":
    main()
