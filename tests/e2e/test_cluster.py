"""The map of the cluster and the pages of its machines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.e2e.accessibility import LOCALES, appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints
from tests.e2e.scenes import digits, join, lose, measure, reform, start, train, use

from share_compute.lifecycle.attempt_events import Measured, Planned, StageTiming
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.plan import IdleMachine
from share_compute.store import ContributorRecord, JobRecord, Store
from share_compute.topology import Device, Link

pytestmark = pytest.mark.browser
NIGHT = "layers 1\N{EN DASH}2 of 3"


def node(page: Page, name: str) -> Locator:
    """Return a machine of the map."""
    return page.get_by_role("group", name="Machines and islands").get_by_role(
        "link", name=re.compile(rf"^{name}, ")
    )


def two_islands(store: Store) -> list[ContributorRecord]:
    """Six machines join: three at one site, and three far from them."""
    found: list[ContributorRecord] = []
    for index, name in enumerate(("ash", "birch", "cedar", "doug", "elm", "fir")):
        _, code = store.invites.create(label="Ada" if index < 3 else "Grace")
        machine, _ = store.contributors.join(
            code, name=name, host=f"{name}.example", versions={"python": "3.11.7"}, limits={"cpu_threads": 4}
        )
        store.contributors.online(machine.id, node_id=f"{index:02d}" * 28, address=f"192.0.2.{index + 1}")
        device = Device(
            "cuda" if index == 4 else "cpu", "Example device", 4 << 30, {"float32": 5e10 * (index + 1)}, 2e10
        )
        far = index >= 3
        links = [Link("head", machine.id, 0.03 if far else 0.00023, 4e6 if far else 1.2e9)]
        for place, other in enumerate(found):
            together = (place >= 3) == far
            links.append(Link(machine.id, other.id, 0.0006 if together else 0.03, 1.1e9 if together else 4e6))
        found.append(store.contributors.ready(machine.id, capacity=[device], links=links))
    return found


def time_it(store: Store, job: JobRecord, machines: list[ContributorRecord]) -> None:
    """Steps were measured: the first machine computes most of the time."""
    busy = {machine.id: 0.8 / (place + 1) for place, machine in enumerate(machines)}
    stages = tuple(StageTiming(predicted_busy_s=None, measured_busy_s=seconds) for seconds in busy.values())
    measured = Measured(step=10, predicted_step_s=None, measured_step_s=1.0, stages=stages, machines=busy)
    store.progress.record(job.id, job.attempt, [measured])


def test_the_map_shows_machines_as_they_join_work_and_go(page: Page, cluster: Cluster) -> None:
    birch = join(cluster.store, "birch")
    expect(node(page, "birch")).to_have_accessible_name(re.compile("joining"))
    measure(cluster.store, birch, 51e9)
    expect(node(page, "birch")).to_have_accessible_name(re.compile(r"ready, 51\.0 GFLOP/s"))
    ash = measure(cluster.store, join(cluster.store, "ash"), 51e9)
    expect(node(page, "ash")).to_have_accessible_name(re.compile("ready"))
    job = cluster.store.jobs.create(digits())
    start(cluster.store, job, [ash, birch])
    expect(node(page, "birch")).to_have_accessible_name(re.compile(f"digits, {NIGHT}"))
    cluster.store.contributors.set_state(
        cluster.store.contributors.get(birch.id),
        ContributorState.lost,
        "its Ray node is dead or does not answer",
    )
    expect(node(page, "birch")).to_have_count(0)
    page.get_by_role("switch", name="Show 1 that left").check()
    expect(node(page, "birch")).to_have_accessible_name(re.compile("lost"))
    assert "gone=true" in page.url


def test_machines_stay_where_they_are_when_others_come_and_go(page: Page, cluster: Cluster) -> None:
    machines = two_islands(cluster.store)
    expect(page.get_by_text("Island 2", exact=True).first).to_be_visible()
    expect(node(page, "fir")).to_have_count(1)

    def places() -> dict[str, Any]:
        names = ("ash", "cedar", "doug", "elm", "fir")
        return {name: node(page, name).locator("xpath=../..").get_attribute("style") for name in names}

    before = places()
    cluster.store.contributors.set_state(
        machines[1], ContributorState.lost, "its Ray node is dead or does not answer"
    )
    expect(node(page, "birch")).to_have_count(0)
    assert places() == before


def test_machines_of_the_map_are_reached_by_the_keyboard(page: Page, cluster: Cluster) -> None:
    two_islands(cluster.store)
    expect(node(page, "fir")).to_have_count(1)
    page.get_by_role("searchbox", name="Search machines").focus()
    page.keyboard.press("Tab")
    expect(node(page, "ash")).to_be_focused()
    expect(page.get_by_role("region", name="Map of the machines")).to_contain_text("Ada")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="birch", level=1)).to_be_visible()


def test_the_table_is_sorted_searched_and_kept_in_the_address(page: Page, cluster: Cluster) -> None:
    two_islands(cluster.store)
    page.get_by_role("link", name="Table").click()
    rows = page.get_by_role("table", name="Machines").get_by_role("row")
    expect(rows).to_have_count(7)
    page.get_by_role("button", name="Speed (float32)").click()
    page.get_by_role("button", name="Speed (float32)").click()
    expect(rows.nth(1)).to_contain_text("fir")
    page.get_by_role("searchbox", name="Search machines").fill("grace")
    expect(rows).to_have_count(4)
    assert all(part in page.url for part in ("view=table", "sort=speed", "desc=true", "q=grace"))
    page.reload()
    expect(rows).to_have_count(4)
    expect(rows.nth(1)).to_contain_text("fir")
    page.get_by_role("searchbox", name="Search machines").fill("nobody")
    expect(page.get_by_role("heading", name="No machine fits")).to_be_visible()


def test_the_page_of_a_machine_shows_its_history_after_a_loss(page: Page, cluster: Cluster) -> None:
    ash, birch = (measure(cluster.store, join(cluster.store, name), 51e9) for name in ("ash", "birch"))
    job = cluster.store.jobs.create(digits())
    page.goto(f"{cluster.url}/machines/{birch.id}")
    expect(page.get_by_role("heading", name="birch", level=1)).to_be_visible()
    expect(page.get_by_text("Nothing: it is free for the next job.")).to_be_visible()
    start(cluster.store, job, [ash, birch])
    holds = page.get_by_role("region", name="Current work")
    expect(holds).to_contain_text(NIGHT)
    train(cluster.store, job, 1, 10)
    gave = page.get_by_role("region", name="Contributions")
    expect(gave).to_contain_text("10 steps, 40 microbatches, 320 samples")
    time_it(cluster.store, job, [ash, birch])
    busy = page.get_by_role("img", name=re.compile("Busy share of a step: 40%"))
    expect(busy).to_be_visible()
    reform(cluster.store, job, [ash], "birch made room")
    history = page.get_by_role("region", name="History").get_by_role("listitem")
    expect(history.first).to_contain_text("It is free again.")
    expect(history.filter(has_text="It holds")).to_contain_text(f"{NIGHT} of digits")
    lose(cluster.store, job, birch)
    expect(history.first).to_contain_text("Its Ray node is dead or does not answer.")
    expect(page.get_by_text("lost", exact=True).first).to_be_visible()
    expect(page.get_by_role("button", name="Remove")).to_have_count(0)
    expect(page.get_by_text(re.compile("Last seen (just now|[0-9]+ s ago)"))).to_be_visible()


def test_the_page_of_a_free_machine_says_why_it_is_not_needed(page: Page, cluster: Cluster) -> None:
    ash, birch = (measure(cluster.store, join(cluster.store, name), 51e9) for name in ("ash", "birch"))
    job = cluster.store.jobs.create(digits())
    start(cluster.store, job, [ash])
    plan = cluster.store.jobs.get(job.id).plan
    assert plan is not None
    idle = IdleMachine(contributor_id=birch.id, name="birch", reason="its link would slow the job down")
    cluster.store.progress.record(job.id, job.attempt, [Planned(plan=plan.with_idle((idle,)))])
    page.goto(f"{cluster.url}/machines/{birch.id}")
    expect(
        page.get_by_text("This machine is not needed now: Its link would slow the job down.")
    ).to_be_visible()


def test_the_map_shows_flows_and_utilization_and_zooms(page: Page, cluster: Cluster) -> None:
    machines = two_islands(cluster.store)
    job = cluster.store.jobs.create(digits())
    start(cluster.store, job, machines[:2])
    for machine, busy in zip(machines, (0.95, 0.2), strict=False):
        use(cluster.server.utilization, cluster.store, machine, busy)
    page.reload()
    chart = page.get_by_role("group", name="Machines and islands")
    lines = chart.locator("[class*='_flow_']")
    expect(lines.first).to_have_attribute("data-moving", "false")
    train(cluster.store, job, 1, 1)
    expect(lines.first).to_have_attribute("data-moving", "true")
    expect(node(page, "ash")).to_have_attribute("data-busy", "high")
    expect(node(page, "birch")).to_have_attribute("data-busy", "low")
    expect(node(page, "birch")).to_have_accessible_name(re.compile("20% in use$"))
    expect(chart).to_contain_text("digits 95%")
    width = chart.evaluate("element => element.clientWidth")
    page.get_by_role("button", name="Zoom in").click()
    page.wait_for_function(f"() => document.querySelector('svg[role=group]').clientWidth > {width}")
    expect(page.get_by_role("button", name="Zoom out")).to_be_enabled()


def test_the_last_hour_of_machines_is_drawn_on_one_scale(page: Page, cluster: Cluster) -> None:
    machines = two_islands(cluster.store)

    def report() -> None:
        for machine, busy in zip(machines, (0.95, 0.2), strict=False):
            use(cluster.server.utilization, cluster.store, machine, busy)

    report()
    page.get_by_role("link", name="Utilization").click()
    charts = page.get_by_role("region", name="Utilization of the machines")
    expect(charts.get_by_role("listitem")).to_have_count(6)
    expect(charts.get_by_role("img", name=re.compile("^ash: 95% in use now, "))).to_be_visible()
    expect(charts).to_contain_text("Machines that reported nothing in the last minute: 4.")
    report()  # figures of more than a minute ago do not count
    page.goto(f"{cluster.url}/?view=table&sort=use&desc=true")
    rows = page.get_by_role("table", name="Machines").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("95%")
    page.goto(f"{cluster.url}/machines/{machines[1].id}")
    used = page.get_by_role("region", name="Utilization")
    expect(
        used.get_by_role(
            "img", name=re.compile(r"^CPU \(lent threads\): 20% at last, .*; CPU \(whole host\): ")
        )
    ).to_be_visible()
    for quantity in ("Memory in use", "Temperature", r"Network \(in\)"):
        expect(used.get_by_role("img", name=re.compile(f"^{quantity}: "))).to_be_visible()
    expect(used.get_by_role("img", name=re.compile("GPU"))).to_have_count(0)


def test_tables_and_cards_become_compact_and_stay_so(page: Page, cluster: Cluster) -> None:
    two_islands(cluster.store)
    page.goto(f"{cluster.url}/?view=table")
    row = page.get_by_role("table", name="Machines").get_by_role("row").nth(1)
    tall = row.evaluate("element => element.clientHeight")
    button = page.get_by_role("button", name="Compact tables and cards")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert row.evaluate("element => element.clientHeight") < tall
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-density", "compact")
    button.click()
    expect(page.locator("html")).to_have_attribute("data-density", "comfortable")


def test_a_machine_that_is_not_there_is_said_to_be_unknown(
    page: Page, cluster: Cluster, complaints: Complaints
) -> None:
    page.goto(f"{cluster.url}/machines/con-nowhere")
    expect(page.get_by_text("There is no machine con-nowhere.")).to_be_visible()
    # The browser logs requests that the server refuses.
    assert [text for text in complaints if "404" not in text] == []
    complaints.clear()


def test_a_machine_is_removed_after_a_question(page: Page, cluster: Cluster) -> None:
    machine = measure(cluster.store, join(cluster.store, "birch"), 51e9)
    page.goto(f"{cluster.url}/machines/{machine.id}")
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep it").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert cluster.store.contributors.get(machine.id).state == "ready"
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.get_by_text("The operator removed it.").first).to_be_visible()
    expect(page.get_by_role("button", name="Remove")).to_have_count(0)
    assert cluster.store.contributors.get(machine.id).state == "draining"


def test_islands_of_many_machines_are_bubbles_that_open(page: Page, cluster: Cluster) -> None:
    for number in range(160):
        measure(cluster.store, join(cluster.store, f"m{number:03d}"), 1e10)
    page.reload()
    bubble = page.get_by_role("link", name=re.compile("Island 1: 160 machines"))
    bubble.click()
    expect(node(page, "m000")).to_have_count(1)
    expect(node(page, "m159")).to_have_count(1)
    page.get_by_role("link", name="All islands").click()
    expect(bubble).to_be_visible()
    page.get_by_role("link", name="Table").click()
    expect(page.get_by_text("1\N{EN DASH}50 of 160")).to_be_visible()
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_role("link", name="m050")).to_be_visible()


@appearances("desk", ("en", "zh"))
def test_the_map_and_the_pages_of_machines_are_accessible_and_fit(
    cluster: Cluster,
    browser: Browser,
    tmp_path: Path,
    scheme: Any,
    width: int,
    language: str,
    complaints: Complaints,
) -> None:
    store = cluster.store
    machines = two_islands(store)
    join(store, "gum")
    job = store.jobs.create(digits())
    start(store, job, machines[:2])
    train(store, job, 1, 10)
    time_it(store, job, machines[:2])
    for machine in machines:
        use(cluster.server.utilization, store, machine, 0.7)
    store.contributors.set_state(
        store.contributors.get(machines[3].id),
        ContributorState.lost,
        "its Ray node is dead or does not answer",
    )
    options = {"reduced_motion": "reduce", "locale": LOCALES[language]}
    with checked_pages(browser, tmp_path, complaints, scheme=scheme, width=width, **options) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/#key={cluster.key}")
        paths = (
            "?gone=true",
            "?view=table&gone=true",
            "?view=use",
            f"machines/{machines[0].id}",
            f"machines/{machines[3].id}",
        )
        for path in paths:
            page.goto(f"{cluster.url}/{path}")
            page.get_by_role("heading", level=1).wait_for()
            expect(page.get_by_label("Loading")).to_have_count(0)
            seen.check(path.replace(machines[0].id, "at-work").replace(machines[3].id, "lost"))
