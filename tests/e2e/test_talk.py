"""Deployments and the playground in a real browser, with small real models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, FloatRect, Locator, Page, expect
from tests.api.conftest import wait_until
from tests.conftest import wait_for
from tests.e2e.accessibility import appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints, copied, open_cluster
from tests.e2e.scenes import join, measure
from tests.e2e.talking import TalkingServer, make_model

from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState
from share_compute.specification import ServeJob
from share_compute.store import ContributorRecord

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def poet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "poet")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "base", with_template=False)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(tmp_path, TalkingServer) as cluster:
        yield cluster


def talking(cluster: Cluster) -> TalkingServer:
    assert isinstance(cluster.server, TalkingServer)
    return cluster.server


def machines(cluster: Cluster, *names: str) -> list[ContributorRecord]:
    return [measure(cluster.store, join(cluster.store, name), 51e9) for name in names]


def deploy(cluster: Cluster, name: str, folder: Path) -> None:
    spec = ServeJob.model_validate({"name": name, "model": {"path": str(folder)}})
    cluster.store.deployments.create(spec, reason="submitted")


def open_playground(page: Page, cluster: Cluster, names: str = "poet") -> None:
    """Open the playground when the deployment answers."""
    page.goto(f"{cluster.url}/playground?with={names}")
    for name in names.split(","):
        button = page.get_by_role("group", name="Models").get_by_role("button", name=name, exact=True)
        expect(button).to_have_attribute("aria-pressed", "true")


def answer(page: Page, model: str) -> Locator:
    return page.get_by_role("region", name=f"Answer of {model}").last


def text(page: Page, model: str) -> Locator:
    return answer(page, model).get_by_test_id("answer")


def say(page: Page, prompt: str) -> None:
    page.get_by_label("Your message").fill(prompt)
    page.keyboard.press("Enter")


def wait_for_text(page: Page, length: int) -> None:
    said = "length => document.querySelector('[data-testid=answer]').innerText.length > length"
    page.wait_for_function(said, arg=length)


def bare(text: str) -> str:
    """Remove spaces, some of which belong to the layout."""
    return re.sub(r"\s+", "", text)


def limit(page: Page, **numbers: str) -> None:
    """Set parameters."""
    if not page.get_by_label("System prompt").is_visible():
        page.locator("summary", has_text="Parameters").click()
    for label, value in numbers.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)


def test_a_model_is_deployed_shown_scaled_and_taken_down(page: Page, cluster: Cluster, poet: Path) -> None:
    machines(cluster, "ash", "birch")
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.get_by_text("No model is served.")).to_be_visible()
    page.get_by_role("link", name="Deploy a model").first.click()
    page.get_by_label(re.compile("^Model")).fill(str(poet))
    expect(page.get_by_label(re.compile("^Name"))).to_have_value("poet")
    page.get_by_label(re.compile("^Compiled code")).select_option("if it is faster")
    page.get_by_role("button", name="Deploy", exact=True).click()
    expect(page.get_by_role("heading", name="poet", level=1)).to_be_visible()
    assert cluster.store.deployments.get("poet").spec.compile == "auto"
    chosen = Computation(is_compiled=False, gain=0.97, sentence="eager: compiled code is 0.97 times as fast")
    cluster.store.deployments.choose_computation("poet", chosen)
    expect(page.get_by_role("log")).to_contain_text("Eager: compiled code is 0.97 times as fast")
    expect(page.get_by_text("Eager: compiled code is 0.97 times as fast")).to_have_count(2)
    expect(page.get_by_text("ready", exact=True)).to_be_visible()
    placement = page.get_by_role("figure", name=re.compile("Placement of 4 layers"))
    expect(placement).to_contain_text("birch")
    stages = page.get_by_role("group", name="Stages")
    expect(stages.get_by_role("row", name=re.compile("ash"))).to_contain_text("alive")
    expect(page.get_by_text("ash computes most of a token.")).to_be_visible()
    snippet = page.get_by_label("Example", exact=True)
    expect(snippet).to_contain_text(f'base_url="{cluster.url}/v1"')
    page.get_by_text("curl", exact=True).click()
    expect(snippet).to_contain_text(f"curl -N {cluster.url}/v1/chat/completions")

    page.get_by_role("button", name="Scale").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label(re.compile("Fewest")).fill("0")
    dialog.get_by_label(re.compile("Most")).fill("2")
    dialog.get_by_role("button", name="Scale").click()
    expect(page.get_by_text("1/0..2")).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text("Replicas asked for: 0..2, before 1.")

    page.get_by_role("button", name="Take down").click()
    page.get_by_role("dialog").get_by_role("button", name="Take down").click()
    expect(page.get_by_text("stopped", exact=True)).to_be_visible()
    page.get_by_role("link", name="Models", exact=True).click()
    page.get_by_role("link", name="over").click()
    expect(page.get_by_role("row", name=re.compile("poet"))).to_contain_text("stopped")


def test_what_cannot_be_deployed_is_said_at_its_field(
    page: Page, cluster: Cluster, complaints: Complaints
) -> None:
    page.goto(f"{cluster.url}/models?new=true&path=/nowhere/poet")
    page.get_by_role("button", name="Deploy", exact=True).click()
    expect(page.get_by_label(re.compile("^Model"))).to_have_attribute("aria-invalid", "true")
    assert [said for said in complaints if "422" not in said] == []
    complaints.clear()


@pytest.mark.real_path
def test_answers_stream_stop_and_stay(page: Page, cluster: Cluster, poet: Path) -> None:
    machines(cluster, "ash", "birch")
    deploy(cluster, "poet", poet)
    open_playground(page, cluster)
    limit(page, Most_tokens="400", Seed="7")
    talking(cluster).talkers["poet"].allow(30)
    say(page, "Sing of the sea.")
    expect(text(page, "poet")).not_to_be_empty()
    expect(answer(page, "poet")).to_contain_text("first token")
    begun = text(page, "poet").inner_text()
    page.keyboard.press("Escape")
    expect(answer(page, "poet")).to_contain_text("stopped")
    assert text(page, "poet").inner_text().startswith(begun[:5])

    # The conversation is still there when the user returns, also after a reload.
    page.get_by_role("link", name="Jobs").click()
    page.get_by_role("link", name="Models").click()
    page.get_by_role("link", name="Playground").click()
    expect(text(page, "poet")).not_to_be_empty()
    page.reload()
    expect(text(page, "poet")).not_to_be_empty()

    talking(cluster).talkers["poet"].allow(float("inf"))
    limit(page, Most_tokens="20")
    answer(page, "poet").get_by_role("button", name="Regenerate").click()
    expect(answer(page, "poet")).to_contain_text("20 tokens")
    expect(answer(page, "poet")).to_contain_text("tokens/s")
    first = text(page, "poet").inner_text()
    # With the same seed, the answer is the same.
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Your message")).to_have_value("Sing of the sea.")
    page.get_by_role("button", name="Send anew").click()
    expect(answer(page, "poet")).to_contain_text("20 tokens")
    assert text(page, "poet").inner_text() == first
    expect(page.get_by_role("article")).to_have_count(1)
    answer(page, "poet").get_by_role("button", name="Copy").click()
    wait_for(lambda: copied(page).strip() == first.strip(), "the copied answer")

    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("article")).to_have_count(0)
    limit(page, Most_tokens="5")
    say(page, "What is left?")
    expect(answer(page, "poet")).to_contain_text("5 tokens")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    names = "[...Object.keys(sessionStorage), ...Object.keys(localStorage)]"
    assert page.evaluate(f"{names}.filter(name => name.includes('conversation'))") == []


def test_conversations_are_kept_renamed_exported_and_deleted(
    page: Page, cluster: Cluster, poet: Path
) -> None:
    machines(cluster, "ash")
    deploy(cluster, "poet", poet)
    open_playground(page, cluster)
    limit(page, Most_tokens="5", Seed="7")
    say(page, "Sing of the sea.")
    expect(answer(page, "poet")).to_contain_text("5 tokens")
    said = text(page, "poet").inner_text()
    page.get_by_role("button", name="New conversation").click()
    say(page, "And the wind?")
    expect(answer(page, "poet")).to_contain_text("5 tokens")
    page.reload()
    page.get_by_role("button", name="Rename Sing of the sea.").click()
    page.get_by_label("Title of the conversation").fill("The sea")
    page.keyboard.press("Enter")
    page.get_by_role("button", name=re.compile("^The sea")).click()
    expect(page.get_by_role("article")).to_contain_text("Sing of the sea.")
    assert text(page, "poet").inner_text() == said
    with page.expect_download() as download:
        page.get_by_role("button", name="Export The sea as JSON").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert exported["conversations"][0]["messages"][0] == {"role": "user", "content": "Sing of the sea."}
    page.get_by_role("button", name="Delete The sea").click()
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_role("button", name=re.compile("^And the wind"))).to_be_visible()


@pytest.mark.parametrize("name", ["poet", "base"])
def test_the_programs_run_as_they_are_shown(
    page: Page, cluster: Cluster, poet: Path, base: Path, name: str
) -> None:
    machines(cluster, "ash")
    deploy(cluster, name, poet if name == "poet" else base)
    open_playground(page, cluster, name)
    limit(page, Most_tokens="6", Seed="7", Temperature="0.5")
    page.get_by_label("top_k", exact=True).fill("20")
    page.get_by_label("System prompt").fill('Don\'t say "no"; 说 $HOME `x`\\')
    say(page, "What's the sea?")
    expect(answer(page, name)).to_contain_text("6 tokens")
    said = text(page, name).inner_text()
    page.get_by_text("The same with curl or Python").click()
    program = page.get_by_label("Example", exact=True)
    route = "chat.completions" if name == "poet" else "client.completions"
    expect(program).to_contain_text(route)
    script = program.inner_text().replace("YOUR_API_KEY", cluster.key)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert bare(ran.stdout) == bare(said)
    page.get_by_text("curl", exact=True).click()
    expect(program).to_contain_text("curl -N")
    script = program.inner_text().replace("YOUR_API_KEY", cluster.key)
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.rstrip().endswith("data: [DONE]")


def test_two_models_answer_side_by_side_one_of_them_without_a_template(
    page: Page, cluster: Cluster, poet: Path, base: Path
) -> None:
    # Each deployment gets a machine: the first takes all that are ready when it starts.
    machines(cluster, "ash")
    deploy(cluster, "poet", poet)
    open_playground(page, cluster)
    expect(page.get_by_role("button", name="poet", exact=True)).to_be_visible()
    machines(cluster, "birch")
    deploy(cluster, "base", base)
    open_playground(page, cluster, "poet,base")
    limit(page, Most_tokens="24", Temperature="0")  # a drawn token may end an answer earlier
    say(page, "the quick brown")
    expect(answer(page, "poet")).to_contain_text("24 tokens")
    expect(answer(page, "base")).to_contain_text("24 tokens")
    expect(answer(page, "base")).to_contain_text("no chat template")

    def boxes() -> tuple[FloatRect, FloatRect]:
        left, right = answer(page, "poet").bounding_box(), answer(page, "base").bounding_box()
        assert left is not None and right is not None  # noqa: PT018 - for the type checker
        return left, right

    def are_beside_each_other() -> bool:
        left, right = boxes()
        return left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]

    def are_below_each_other() -> bool:
        left, right = boxes()
        return left["y"] + left["height"] <= right["y"]

    wait_for(are_beside_each_other, "two columns")
    page.set_viewport_size({"width": 390, "height": 800})
    wait_for(are_below_each_other, "one column")


def test_a_machine_dies_and_the_answer_goes_on_with_a_mark_where_it_happened(
    page: Page, cluster: Cluster, poet: Path
) -> None:
    ash, birch = machines(cluster, "ash", "birch")
    del ash
    deploy(cluster, "poet", poet)
    open_playground(page, cluster)
    limit(page, Most_tokens="120", Seed="3", Temperature="0.8")
    talker = talking(cluster).talkers["poet"]
    # This answer, without failures, is compared with the next one.
    say(page, "Sing of the sea.")
    expect(answer(page, "poet")).to_contain_text("120 tokens")
    undisturbed = text(page, "poet").inner_text()

    talker.allow(40)
    answer(page, "poet").get_by_role("button", name="Regenerate").click()
    expect(text(page, "poet")).not_to_be_empty()
    wait_for_text(page, 20)
    talker.lose("birch")
    cluster.store.contributors.set_state(
        cluster.store.contributors.get(birch.id),
        ContributorState.lost,
        "its Ray node is dead or does not answer",
    )
    mark = answer(page, "poet").get_by_role("note")
    expect(mark).to_have_text("birch was lost here")
    expect(answer(page, "poet")).to_contain_text("paused while the stages re-form")
    before = text(page, "poet").inner_text()
    talker.allow(float("inf"))
    talker.go_on()
    expect(mark).to_contain_text("birch was lost here; the answer continues (after")
    expect(answer(page, "poet")).to_contain_text("120 tokens")
    whole = text(page, "poet").inner_text()
    written = mark.inner_text()
    assert bare(whole.replace(written, "")) == bare(undisturbed), "a token was lost, repeated or changed"
    # The mark is behind the block that was written when the text paused.
    assert bare(whole.split(written)[0]).startswith(bare(before.replace("birch was lost here", "")))

    page.goto(f"{cluster.url}/deployments/poet")
    log = page.get_by_role("log")
    expect(log).to_contain_text("birch was lost; its requests wait.")
    expect(log).to_contain_text("Its requests go on, after")
    placement = page.get_by_role("figure", name=re.compile("Placement of 4 layers"))
    expect(placement).not_to_contain_text("birch")


def test_an_answer_continues_after_a_restart_and_a_reload(
    page: Page, cluster: Cluster, poet: Path, complaints: Complaints
) -> None:
    machines(cluster, "ash")
    deploy(cluster, "poet", poet)
    open_playground(page, cluster)
    limit(page, Most_tokens="60", Seed="3")
    talking(cluster).talkers["poet"].allow(25)
    say(page, "Sing of the sea.")
    wait_for_text(page, 12)
    cluster.server.stop()
    expect(answer(page, "poet").get_by_role("status")).to_have_text("reconnecting to the server")
    kept = text(page, "poet").inner_text()
    assert bare(kept)
    # Another server starts, in whose process the model runs again: the stream continues without a click.
    cluster.server.start()
    expect(answer(page, "poet")).to_contain_text("60 tokens")
    expect(answer(page, "poet").get_by_role("status")).to_have_count(0)
    whole = bare(text(page, "poet").inner_text())
    assert whole.startswith(bare(kept))
    assert len(whole) > len(bare(kept))
    # A reload during an answer cancels it.
    talking(cluster).talkers["poet"].allow(25)
    answer(page, "poet").get_by_role("button", name="Regenerate").click()
    wait_for_text(page, 12)
    page.reload()
    expect(answer(page, "poet")).to_contain_text("The page was left while it was written.")
    assert whole.startswith(bare(text(page, "poet").inner_text()))
    talking(cluster).talkers["poet"].allow(float("inf"))
    answer(page, "poet").get_by_role("button", name="Continue").click()
    expect(answer(page, "poet")).to_contain_text("60 tokens")
    assert bare(text(page, "poet").inner_text()) == whole
    # The browser logs requests that get no answer.
    complaints.clear()


@appearances("phone")
def test_the_pages_are_accessible_and_fit(
    cluster: Cluster,
    browser: Browser,
    tmp_path: Path,
    poet: Path,
    scheme: Any,
    width: int,
    complaints: Complaints,
) -> None:
    machines(cluster, "ash", "birch")
    deploy(cluster, "poet", poet)
    failed = cluster.store.deployments.create(
        ServeJob.model_validate({"name": "lost", "model": {"path": "/gone"}}), reason="submitted"
    )
    wait_until(lambda: cluster.store.deployments.get(failed.id).state is DeploymentState.failed)
    with checked_pages(browser, tmp_path, complaints, scheme=scheme, width=width) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/#key={cluster.key}")
        page.get_by_role("heading", name="Machines", level=1).wait_for()
        open_playground(page, cluster)
        page.locator("summary", has_text="Parameters").click()
        limit(page, Most_tokens="60", Seed="3")
        talking(cluster).talkers["poet"].allow(30)
        say(page, "Sing of the sea.")
        expect(text(page, "poet")).not_to_be_empty()
        talking(cluster).talkers["poet"].lose("birch")
        expect(answer(page, "poet").get_by_role("note")).to_be_visible()
        for path in (
            "playground",
            "models",
            "models?new=true",
            "deployments/poet",
            f"deployments/{failed.id}",
        ):
            if path != "playground":
                page.goto(f"{cluster.url}/{path}")
            page.get_by_role("heading", level=1).wait_for()
            expect(page.get_by_label("Loading")).to_have_count(0)
            seen.check(path.replace(failed.id, "failed"))
