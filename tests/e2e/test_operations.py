"""The page of administrators and the invites in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.conftest import wait_for
from tests.e2e.accessibility import LOCALES, appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints, copied
from tests.e2e.scenes import digits, join, lose, measure, start

from share_compute.lifecycle.states import ContributorState
from share_compute.scopes import Scope
from share_compute.store import ContributorRecord, Store
from share_compute_api.schemas.versions import local_versions

pytestmark = pytest.mark.browser


def part(page: Page, title: str) -> Locator:
    return page.get_by_role("region", name=title, exact=True)


def join_as(store: Store, name: str, **versions: str) -> ContributorRecord:
    """Let a machine join with the server's versions, except for these."""
    _, code = store.invites.create()
    known = {**local_versions().model_dump(), **versions}
    record, _ = store.contributors.join(code, name=name, host=f"{name}.example", versions=known, limits={})
    return measure(store, record, 51e9)


@pytest.fixture
def admin(page: Page) -> Page:
    page.get_by_role("link", name="Admin").click()
    page.get_by_role("heading", name="Admin", level=1).wait_for()
    return page


def test_alerts_and_the_queue_follow_what_happens(admin: Page, cluster: Cluster) -> None:
    alerts, queue = part(admin, "Alerts"), part(admin, "Queue of jobs")
    expect(alerts).to_contain_text("The server runs without a cluster")
    expect(queue).to_contain_text("No job waits.")
    first, second = (cluster.store.jobs.create(digits()) for _ in range(2))
    cluster.store.jobs.explain(second.id, "waiting for contributors: needs 2, none is ready")
    row = queue.get_by_role("row").nth(2)
    expect(row).to_contain_text("Waiting for contributors: needs 2, none is ready.")
    machine = join_as(cluster.store, "ash")
    start(cluster.store, first, [machine])
    expect(queue.get_by_role("row")).to_have_count(2)
    lose(cluster.store, first, machine)
    expect(alerts.get_by_role("listitem")).to_have_count(3)
    expect(alerts.get_by_role("listitem").nth(0)).to_contain_text(
        "Job digits failed: machines were lost: ash."
    )
    expect(alerts).to_contain_text("Machine ash was lost: its Ray node is dead or does not answer.")
    alerts.get_by_role("link", name="Open the job").click()
    expect(admin).to_have_url(f"{cluster.url}/jobs/{first.id}")


def test_equal_alerts_are_one_line_and_acknowledged_ones_come_back_when_they_change(
    admin: Page, cluster: Cluster
) -> None:
    alerts, badge = part(admin, "Alerts"), admin.get_by_role("link", name="Admin")
    machines = [join_as(cluster.store, name) for name in ("ash", "birch", "cedar")]
    for machine in machines[:2]:
        cluster.store.contributors.set_state(
            cluster.store.contributors.get(machine.id),
            ContributorState.lost,
            "its Ray node is dead or does not answer",
        )
    summary = alerts.get_by_text("Each of 2 machines was lost: its Ray node is dead or does not answer.")
    expect(badge).to_have_accessible_name("Admin 2 alerts")
    summary.click()
    expect(alerts.get_by_role("link", name="birch")).to_be_visible()
    alerts.get_by_role("button", name=re.compile("Acknowledge: Each of 2 machines")).click()
    expect(badge).to_have_accessible_name("Admin 1 alert")
    admin.reload()
    expect(alerts.get_by_text("2 acknowledged in this browser")).to_be_visible()
    expect(badge).to_have_accessible_name("Admin 1 alert")
    cluster.store.contributors.set_state(
        cluster.store.contributors.get(machines[2].id),
        ContributorState.lost,
        "its Ray node is dead or does not answer",
    )
    # Only the machine that was lost since is new.
    expect(badge).to_have_accessible_name("Admin 2 alerts")
    alerts.get_by_text("2 acknowledged in this browser").click()
    alerts.get_by_role("button", name=re.compile("Show as new")).click()
    expect(alerts.get_by_text("Each of 3 machines was lost")).to_be_visible()


def test_machines_that_differ_from_the_server_are_marked_and_can_be_removed(
    admin: Page, cluster: Cluster
) -> None:
    machines = part(admin, "Machines")
    expect(machines).to_contain_text("No machine is here.")
    join_as(cluster.store, "ash")
    birch = join_as(cluster.store, "birch", torch="1.0.0")
    expect(machines.get_by_role("row", name=re.compile("ash"))).to_contain_text("ready")
    expect(machines.get_by_role("row", name=re.compile("ash"))).not_to_contain_text("the server has")
    row = machines.get_by_role("row", name=re.compile("birch"))
    expect(row).to_contain_text(f"torch 1.0.0, the server has {local_versions().torch}")
    expect(part(admin, "Alerts")).to_contain_text("Machine birch does not fit: the server runs torch")
    row.get_by_role("button", name="Remove birch").click()
    admin.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(row).to_contain_text("draining")
    assert cluster.store.contributors.get(birch.id).removed_at is not None


def test_a_key_is_made_shown_once_and_revoked(admin: Page, cluster: Cluster) -> None:
    keys = part(admin, "API keys")
    expect(keys.get_by_role("row", name=re.compile("browser"))).to_contain_text("you are signed in with it")
    keys.get_by_label("For whom or what").fill("Ada's scripts")
    keys.get_by_role("button", name="Create key").click()
    line = keys.get_by_label("New API key")
    bearer = {"Authorization": f"Bearer {line.inner_text()}"}
    assert httpx.get(f"{cluster.url}/v1/models", headers=bearer).status_code == 200
    keys.get_by_role("button", name="Copy").first.click()
    wait_for(lambda: copied(admin) == line.inner_text(), "the copied key")
    keys.get_by_role("button", name="Revoke the key Ada's scripts").click()
    admin.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(admin.get_by_role("dialog")).to_have_count(0)
    expect(keys.get_by_role("row", name=re.compile("Ada"))).to_have_count(0)
    keys.get_by_label("Show the revoked (1)").check()
    expect(keys.get_by_role("row", name=re.compile("Ada"))).to_contain_text("revoked")
    assert [record.name for record in cluster.store.keys.list() if record.revoked_at] == ["Ada's scripts"]


def test_revoking_the_own_key_signs_out(admin: Page, cluster: Cluster, complaints: Complaints) -> None:
    cluster.store.keys.create("another operator", [Scope.admin])
    keys = part(admin, "API keys")
    keys.get_by_role("button", name="Revoke the key browser").click()
    expect(admin.get_by_role("dialog")).to_contain_text("you are signed out too")
    admin.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(admin.get_by_text("Your session is over.")).to_be_visible()
    # The browser logs requests that the server refuses.
    assert [text for text in complaints if "401" not in text] == []
    complaints.clear()


def test_the_server_is_described(admin: Page, cluster: Cluster) -> None:
    server = part(admin, "Server")
    for text in (
        cluster.url,
        "SQLite",
        str(cluster.folder),
        f"Ray {local_versions().ray}",
        "none: machines cannot",
    ):
        expect(server).to_contain_text(text)


def test_an_invite_says_who_joined_with_it_and_when_it_is_over(page: Page, cluster: Cluster) -> None:
    cluster.store.invites.create("late", expires_in_s=0.001)
    page.get_by_role("link", name="Invite", exact=True).click()
    page.get_by_role("button", name="Create invite").click()
    line = page.get_by_label("Command to join")
    code = line.inner_text().split()[0].removeprefix("SHARE_COMPUTE_INVITE=")
    versions = local_versions().model_dump()
    cluster.store.contributors.join(code, name="ash", host="h", versions=versions, limits={})
    expect(page.get_by_text("ash joined with it.")).to_be_visible()
    expect(line).to_have_count(0)
    expect(page.get_by_role("row", name=re.compile("by ash"))).to_contain_text("used")
    expect(page.get_by_role("row", name=re.compile("late"))).to_contain_text("expired")


def test_an_invite_warns_if_no_other_machine_can_join(page: Page) -> None:
    page.get_by_role("link", name="Invite", exact=True).click()
    expect(page.get_by_text("Only the server's own machine can join")).to_be_visible()
    expect(page.get_by_text("share-compute up --host 0.0.0.0")).to_be_visible()
    page.get_by_role("button", name="Create invite").click()
    lines = page.get_by_role("main").get_by_label(re.compile("Command to"))
    expect(lines.nth(0)).to_contain_text("make setup")
    expect(lines.nth(1)).to_contain_text("share-compute join")


def test_an_invite_of_several_uses_stays_open_until_all_are_used(page: Page, cluster: Cluster) -> None:
    page.get_by_role("link", name="Invite", exact=True).click()
    page.get_by_label("Machines", exact=True).fill("2")
    page.get_by_role("button", name="Create invite").click()
    line = page.get_by_label("Command to join")
    expect(page.get_by_text("works 2 times")).to_be_visible()
    code = line.inner_text().split()[0].removeprefix("SHARE_COMPUTE_INVITE=")
    row = page.get_by_role("row", name=re.compile("inv-"))
    for name, words in (("ash", "1 of 2 uses"), ("birch", "by ash, birch")):
        cluster.store.contributors.join(code, name=name, host="h", versions={}, limits={})
        expect(row).to_contain_text(words)
    expect(line).to_have_count(0)


@appearances("phone", ("en", "zh"))
def test_the_operators_pages_are_accessible_and_fit(
    cluster: Cluster,
    browser: Browser,
    tmp_path: Path,
    language: str,
    scheme: Any,
    width: int,
    complaints: Complaints,
) -> None:
    store = cluster.store
    machines = [join_as(store, "ash"), join_as(store, "birch", torch="1.0.0"), join(store, "cedar")]
    failed, waiting = store.jobs.create(digits()), store.jobs.create(digits())
    start(store, failed, machines[:1])
    lose(store, failed, machines[0])
    store.jobs.explain(
        waiting.id, "waiting for contributors: needs 4, 1 is ready (1 more works for other jobs)"
    )
    store.keys.revoke(store.keys.create("Ada's laptop, which was stolen")[0].id)
    store.invites.create("laptop of Grace")
    store.invites.create("late", expires_in_s=0.001)
    store.invites.revoke(store.invites.create("taken back")[0].id)
    locale = LOCALES[language]
    with checked_pages(browser, tmp_path, complaints, scheme=scheme, width=width, locale=locale) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/#key={cluster.key}")
        page.get_by_role("heading", level=1).wait_for()
        for path in ("admin", "invites", "nowhere"):
            page.goto(f"{cluster.url}/{path}")
            page.get_by_role("heading", level=1).wait_for()
            expect(page.locator(".mantine-Skeleton-root")).to_have_count(0)
            seen.check(path)


def test_a_page_shows_what_its_key_may_do(page: Page, cluster: Cluster, complaints: Complaints) -> None:
    reader = cluster.store.keys.create("reader", [Scope.read])[1]
    chatter = cluster.store.keys.create("chatter", [Scope.chat])[1]
    join(cluster.store, "ash")
    page.goto(f"{cluster.url}/admin#key={reader}")
    expect(page.get_by_role("link", name="Jobs", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="Invite", exact=True)).to_have_count(0)
    expect(page.get_by_role("heading", name="Server", exact=True)).to_be_visible()
    expect(page.get_by_text("ash").first).to_be_visible()
    expect(page.get_by_role("heading", name="API keys")).to_have_count(0)
    expect(page.get_by_role("button", name=re.compile("Remove"))).to_have_count(0)
    page.goto(f"{cluster.url}/invites")
    expect(page.get_by_role("heading", name="This key may not see this page")).to_be_visible()
    expect(page.get_by_text("needs the scope admin; the key reader has read")).to_be_visible()
    page.goto(f"{cluster.url}/jobs#key={chatter}")
    expect(page.get_by_text("needs the scope read; the key chatter has chat")).to_be_visible()
    page.get_by_role("main").get_by_role("link", name="Talk to the models").click()
    expect(page.get_by_role("heading", level=1, name="Playground")).to_be_visible()
    # The browser logs requests that the server refuses.
    assert [text for text in complaints if "403" not in text] == []
    complaints.clear()
