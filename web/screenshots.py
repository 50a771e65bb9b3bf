"""Take the README's pictures: a cluster of three machines on this one, training and serving, in a real browser.

``python web/screenshots.py`` writes ``docs/images``. Needs Chromium; takes about four minutes on two cores.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from share_compute.store.records import ContributorRecord
from share_compute_actors.machine.run_folders import close_run_folder, open_run_folder, sweep
from share_compute_api.client.client import Client
from share_compute_api.demonstration.cluster import LocalCluster
from share_compute_api.demonstration.corpus import gather_corpus
from share_compute_api.demonstration.job import write_job

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MACHINES = ("ann", "bob", "eve")
STEPS = 120
SIZE = {"width": 1200, "height": 780}
LONG_MS = 300_000


def shoot(page: Page, name: str) -> None:
    """Save a screenshot of the page."""
    page.wait_for_timeout(800)  # transitions
    page.screenshot(path=IMAGES / f"{name}.png")


def tour(page: Page, client: Client, url: str, job_file: Path) -> None:
    """Visit the pages during an event on each of them."""
    job = client.submit(job_file.read_text())
    page.goto(f"{url}/jobs/{job.id}")
    expect(page.get_by_text(re.compile(r"Step [6-9]\d of|Step 1\d\d of"))).to_be_visible(timeout=LONG_MS)
    shoot(page, "job")
    page.goto(f"{url}/")
    expect(page.get_by_text(MACHINES[0]).first).to_be_visible()
    shoot(page, "machines")
    for _ in client.follow(job.id):
        pass
    client.deploy({"name": "poet", "model": {"job": job.id}, "parallelism": {"stages": 2}})
    page.goto(f"{url}/deployments/poet")
    expect(page.get_by_text("ready", exact=True)).to_be_visible(timeout=LONG_MS)
    page.goto(f"{url}/playground?with=poet")
    page.get_by_label("Your message").fill("Return the value of")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Answer of poet").last).to_contain_text(
        "tokens/s", timeout=LONG_MS
    )
    shoot(page, "playground")
    page.goto(f"{url}/submit")
    expect(page.get_by_role("figure", name=re.compile("Placement"))).to_be_visible(timeout=LONG_MS)
    shoot(page, "submit")


def ignore(_: list[ContributorRecord]) -> None:
    """Print nothing while machines join."""


def main() -> None:
    """Take all pictures."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("there is no Chromium here: apt-get install chromium")
    IMAGES.mkdir(parents=True, exist_ok=True)
    sweep()
    children = open_run_folder(f"screenshots {os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
            folder = Path(name)
            (folder / "texts").mkdir()
            gather_corpus(folder / "texts" / "corpus.txt")
            cluster = LocalCluster(children, folder / "server", [folder / "texts"])
            try:
                with cluster.start() as client:
                    for machine in MACHINES:
                        cluster.join(client, machine, memory="1GiB")
                    cluster.wait_until_ready(client, ignore)
                    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                    page = browser.new_page(viewport=SIZE, color_scheme="light")
                    page.goto(cluster.sign_in_link())
                    page.get_by_role("heading", name="Machines", level=1).wait_for()
                    job_file = write_job(
                        folder, folder / "texts" / "corpus.txt", stages=len(MACHINES), steps=STEPS
                    )
                    tour(page, client, cluster.url, job_file)
                    browser.close()
            finally:
                cluster.close()
    finally:
        close_run_folder(children)
        sweep()


if __name__ == "__main__":
    main()
