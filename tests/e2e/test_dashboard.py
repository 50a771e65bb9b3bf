"""The dashboard in a real browser against the real server and store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect
from tests.conftest import wait_for
from tests.e2e.accessibility import appearances, checked_pages, violations
from tests.e2e.conftest import Cluster, Complaints, copied
from tests.e2e.scenes import digits, finish, join, lose, measure, reform, start, train

pytestmark = pytest.mark.browser

FIRST_LOAD_BYTES = 250_000


def test_the_link_of_up_signs_in_and_leaves_no_key_in_the_address_bar(page: Page, cluster: Cluster) -> None:
    assert page.url == f"{cluster.url}/"
    expect(page.get_by_role("heading", name="First steps")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()


def test_a_wrong_key_is_refused_and_a_right_one_leads_where_one_wanted_to_go(
    cluster: Cluster, context: BrowserContext
) -> None:
    page = context.new_page()
    page.goto(f"{cluster.url}/jobs")
    page.get_by_label("API key").fill("sck-wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("The server does not know this key.")).to_be_visible()
    page.get_by_label("API key").fill(cluster.key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Jobs", level=1)).to_be_visible()
    expect(page.get_by_role("heading", name="No job yet")).to_be_visible()


def test_the_first_steps_follow_the_cluster_and_can_be_dismissed(page: Page, cluster: Cluster) -> None:
    steps = page.get_by_role("region", name="First steps")
    expect(steps.get_by_role("img", name="to do")).to_have_count(3)
    machine = measure(cluster.store, join(cluster.store, "birch"), 51e9)
    expect(steps.get_by_text("1 machine joined")).to_be_visible()
    job = cluster.store.jobs.create(digits())
    start(cluster.store, job, [machine])
    expect(steps.get_by_role("link", name="digits")).to_be_visible()
    expect(steps.get_by_role("img", name="done")).to_have_count(2)
    steps.get_by_role("button", name="Dismiss").click()
    expect(steps).to_have_count(0)
    page.reload()
    expect(page.get_by_role("region", name="Map of the machines")).to_be_visible()
    expect(steps).to_have_count(0)


def test_the_palette_finds_pages_jobs_and_machines_by_the_keyboard(page: Page, cluster: Cluster) -> None:
    measure(cluster.store, join(cluster.store, "birch"), 51e9)
    job = cluster.store.jobs.create(digits())
    page.keyboard.press("Control+k")
    field = page.get_by_role("combobox", name="Search and commands")
    expect(field).to_be_focused()
    field.fill("dig")
    expect(page.get_by_role("option", name="digits")).to_be_visible()
    assert violations(page) == []
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{cluster.url}/jobs/{job.id}")
    expect(field).to_have_count(0)
    page.get_by_role("button", name="Search and commands").click()
    field.fill("birch")
    expect(page.get_by_role("option", name="birch")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="birch", level=1)).to_be_visible()
    page.keyboard.press("Control+k")
    expect(field).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("option", name="Jobs", exact=True)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Escape")
    expect(field).to_have_count(0)


def test_a_notification_says_that_a_job_has_ended_if_asked_for(
    cluster: Cluster, context: BrowserContext
) -> None:
    context.grant_permissions(["notifications"])
    context.add_init_script(
        "window.shown = []; window.Notification = class { static permission = 'granted';"
        " static async requestPermission() { return 'granted'; }"
        " constructor(title) { window.shown.push(title); } close() {} };"
    )
    page = context.new_page()
    page.goto(f"{cluster.url}/#key={cluster.key}")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    quiet, watched = (cluster.store.jobs.create(digits()) for _ in range(2))
    cluster.store.jobs.cancel(quiet.id)
    page.goto(f"{cluster.url}/jobs/{watched.id}")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    page.keyboard.press("Control+k")
    page.get_by_role("option", name="Watch this job").click()
    cluster.store.jobs.cancel(watched.id)
    page.wait_for_function(
        "() => window.shown.length > 0"
    )  # the policy for scripts forbids to evaluate text twice
    assert page.evaluate("window.shown") == ["digits: cancelled"]


def test_machines_appear_as_they_join(page: Page, cluster: Cluster) -> None:
    page.goto(f"{cluster.url}/?view=table")
    machine = join(cluster.store, "birch")
    row = page.get_by_role("row", name=re.compile("birch"))
    expect(row).to_contain_text("joining")
    measure(cluster.store, machine, 51e9)
    expect(row).to_contain_text("ready")
    expect(row).to_contain_text("51.0 GFLOP/s")
    expect(row).to_contain_text("0.23 ms · 1.20 GB/s")


def test_a_job_is_submitted_watched_and_its_result_fetched(page: Page, cluster: Cluster) -> None:
    machines = [measure(cluster.store, join(cluster.store, name), 51e9) for name in ("ash", "birch")]
    page.get_by_role("link", name="Submit", exact=True).click()
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", name="digits", level=1)).to_be_visible()
    job = cluster.store.jobs.queued()[0]
    assert page.url.endswith(f"/jobs/{job.id}")

    start(cluster.store, job, machines)
    placement = page.get_by_role("figure", name=re.compile("Placement of 3 layers"))
    expect(placement).to_contain_text("ash")
    expect(placement).to_contain_text("1\N{EN DASH}2")
    train(cluster.store, job, 1, 10)
    expect(page.get_by_text("Step 10 of 40 · checkpoint at 10")).to_be_visible()
    curve = page.get_by_role("img", name=re.compile("Loss over steps"))
    expect(curve).to_have_accessible_name(re.compile(r"2\.300 at step 1, 0\.2300 at step 10"))
    train(cluster.store, job, 11, 20)
    expect(curve).to_have_accessible_name(re.compile("at step 20"))
    expect(page.get_by_role("log")).to_contain_text(
        "The pinned plan no longer holds: the job continues without elm"
    )

    finish(cluster.store, job, cluster.folder / "jobs" / job.id / "artifacts" / "model")
    expect(page.get_by_text("All 40 steps are done.", exact=True)).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download config.json").click()
    assert download.value.path().read_text() == '{"model_type": "layers"}'


def test_the_placement_follows_machines_that_come_and_go(page: Page, cluster: Cluster) -> None:
    ash, birch, cedar = (
        measure(cluster.store, join(cluster.store, name), 51e9) for name in ("ash", "birch", "cedar")
    )
    job = cluster.store.jobs.create(digits())
    page.goto(f"{cluster.url}/jobs/{job.id}")
    start(cluster.store, job, [ash, birch])
    placement = page.get_by_role("figure", name=re.compile("Placement of 3 layers"))
    expect(placement).to_contain_text("birch")
    reform(cluster.store, job, [ash, cedar], "birch was lost, cedar joined")
    expect(placement).to_contain_text("cedar")
    expect(placement).not_to_contain_text("birch")
    expect(page.get_by_role("log")).to_contain_text(
        "birch was lost, cedar joined; no step for 800.0 ms, 3 microbatches computed again."
    )


def test_a_lost_machine_ends_the_job_and_resume_queues_it_again(page: Page, cluster: Cluster) -> None:
    machines = [measure(cluster.store, join(cluster.store, name), 51e9) for name in ("ash", "birch")]
    job = cluster.store.jobs.create(digits())
    page.goto(f"{cluster.url}/jobs/{job.id}")
    start(cluster.store, job, machines)
    train(cluster.store, job, 1, 10)
    expect(page.get_by_text("Step 10 of 40")).to_be_visible()
    lose(cluster.store, job, machines[1])
    expect(page.get_by_text("Machines were lost: birch.", exact=True)).to_be_visible()
    expect(page.get_by_text("Resume the job to continue from its last checkpoint")).to_be_visible()
    page.get_by_role("button", name="Resume from step 10").click()
    expect(page.get_by_text("queued", exact=True)).to_be_visible()
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    expect(page.get_by_text("cancelled", exact=True)).to_be_visible()


def test_what_the_server_refuses_stands_at_its_line(page: Page, complaints: Complaints) -> None:
    page.get_by_role("link", name="Submit", exact=True).click()
    page.get_by_text("YAML", exact=True).click()
    editor = page.get_by_label("Job as YAML")
    editor.fill(editor.input_value().replace("name: adamw", "name: adamm"))
    page.get_by_role("button", name="Submit").click()
    problem = page.get_by_role("button", name=re.compile("training.optimizer.name"))
    expect(problem).to_contain_text("Line 17")
    expect(problem).to_contain_text("did you mean 'adam'?")
    editor.fill("name: [digits")
    expect(page.get_by_role("button", name=re.compile("^Line 1"))).to_be_visible()
    expect(page.get_by_role("button", name="Submit")).to_be_disabled()
    # The browser logs requests that the server refuses.
    assert [text for text in complaints if "422" not in text] == []
    complaints.clear()


def test_an_invite_is_made_copied_and_revoked(page: Page, cluster: Cluster) -> None:
    page.get_by_role("link", name="Invite", exact=True).click()
    page.get_by_label("For whom").fill("laptop of Ada")
    page.get_by_label("Memory limit (GiB)").fill("1.5")
    page.get_by_role("button", name="Create invite").click()
    line = page.get_by_label("Command to join")
    expect(line).to_contain_text("share-compute join http://127.0.0.1:")
    assert [invite.memory_bytes for invite in cluster.store.invites.list()] == [3 << 29]
    copy = line.locator("..").get_by_role("button")  # another line says how to install
    copy.click()
    wait_for(lambda: copied(page) == line.inner_text(), "the copied line")
    # Browsers give pages no clipboard if the pages come without TLS from another host.
    page.evaluate("navigator.clipboard.writeText('')")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})")
    copy.click()
    expect(copy).to_have_text("Copied")
    page.evaluate("delete navigator.clipboard")
    wait_for(lambda: copied(page) == line.inner_text(), "the copied line")
    row = page.get_by_role("row", name=re.compile("laptop of Ada"))
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")


def test_a_dropped_stream_goes_on_where_it_stopped(
    page: Page, cluster: Cluster, complaints: Complaints
) -> None:
    page.goto(f"{cluster.url}/?view=table")
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    machine = join(cluster.store, "birch")
    row = page.get_by_role("row", name=re.compile("birch"))
    expect(row).to_contain_text("joining")
    seen = str(cluster.store.events.last_seq())
    cluster.server.stop()
    expect(page.get_by_text("Reconnecting")).to_be_visible()
    measure(cluster.store, machine, 51e9)
    with page.expect_request(
        lambda one: "/api/v1/events?" in one.url and one.headers.get("last-event-id") == seen
    ):
        cluster.server.start()
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    expect(row).to_contain_text("ready")
    # The browser logs requests that get no answer.
    assert [text for text in complaints if "Failed to load resource" not in text] == []
    complaints.clear()


def test_code_that_the_network_interrupts_is_requested_again(
    cluster: Cluster, context: BrowserContext
) -> None:
    job = cluster.store.jobs.create(digits())
    start(
        cluster.store,
        job,
        [measure(cluster.store, join(cluster.store, name), 51e9) for name in ("ash", "birch")],
    )
    page = context.new_page()
    page.goto(f"{cluster.url}/#key={cluster.key}")
    page.get_by_role("heading", name="Machines", level=1).wait_for()
    interrupted: set[str] = set()

    def interrupt(route: Route) -> None:
        if route.request.url in interrupted:
            route.continue_()
        else:
            interrupted.add(route.request.url)
            route.abort("internetdisconnected")

    page.route("**/assets/*.js", interrupt)
    page.get_by_role("link", name="Jobs", exact=True).click()
    page.get_by_role("link", name="digits", exact=True).click()
    expect(page.get_by_role("figure", name=re.compile("Placement of 3 layers"))).to_contain_text("birch")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox")).to_be_visible()
    assert len(interrupted) >= 4


def test_code_that_cannot_be_loaded_is_said_and_loaded_once_the_server_has_it(
    cluster: Cluster, context: BrowserContext
) -> None:
    page = context.new_page()
    page.goto(f"{cluster.url}/#key={cluster.key}")
    page.get_by_role("heading", name="Machines", level=1).wait_for()
    page.route("**/assets/Jobs-*.js", lambda route: route.fulfill(status=404))
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.get_by_text("This page cannot be loaded from the server.")).to_be_visible()
    page.unroute("**/assets/Jobs-*.js")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="No job yet")).to_be_visible()


def test_the_first_load_is_small_and_stays_on_this_host(cluster: Cluster, context: BrowserContext) -> None:
    page = context.new_page()
    sizes: dict[str, int] = {}
    page.on("requestfinished", lambda one: sizes.update({one.url: one.sizes()["responseBodySize"]}))
    page.goto(f"{cluster.url}/#key={cluster.key}")
    page.get_by_role("heading", name="Machines", level=1).wait_for()
    page.wait_for_load_state("load")
    assert all(url.startswith(cluster.url) for url in sizes)
    assert sum(sizes.values()) <= FIRST_LOAD_BYTES


@appearances("phone")
def test_the_first_pages_are_accessible_and_fit(
    cluster: Cluster, browser: Browser, tmp_path: Path, scheme: Any, width: int, complaints: Complaints
) -> None:
    store = cluster.store
    machines = [measure(store, join(store, name), 51e9) for name in ("ash", "birch", "cedar", "doug")]
    running, failed = store.jobs.create(digits()), store.jobs.create(digits())
    start(store, running, machines[:2])
    train(store, running, 1, 10)
    start(store, failed, machines[2:])
    lose(store, failed, machines[2])
    with checked_pages(browser, tmp_path, complaints, scheme=scheme, width=width) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/")
        page.get_by_label("API key").wait_for()
        seen.check("sign-in")
        page.goto(f"{cluster.url}/#key={cluster.key}")
        for path in ("", "jobs", f"jobs/{running.id}", f"jobs/{failed.id}", "submit"):
            page.goto(f"{cluster.url}/{path}")
            page.get_by_role("heading", level=1).wait_for()
            expect(page.get_by_label("Loading")).to_have_count(0)
            seen.check(path)
