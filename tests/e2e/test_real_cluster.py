"""The dashboard over a real cluster: machines that joined, real training, a real served model, and killed machines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import BrowserContext, Page, expect
from tests.api.speaking import make_llama
from tests.conftest import served, wait_for
from tests.e2e.conftest import Complaints, require_dashboard

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.chaos, pytest.mark.exact]
READY_MS = 120_000
DONE_MS = 240_000
LENT = ("--memory", "700MiB", "--cpu-threads", "1", "--device", "cpu", "--json")
STEPS = 500
NAMES = iter(("ann", "bob", "eve", "gus", "ida", "kim", "leo", "mia", "ned", "ora"))


def kill(command: Any) -> None:
    """End a contributor's processes at once, as if its plug were pulled."""
    family = [
        *psutil.Process(command.process.pid).children(recursive=True),
        psutil.Process(command.process.pid),
    ]
    for process in family:
        with suppress(psutil.NoSuchProcess):  # workers end with their raylet
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("poet"), window=512, hidden_size=64, num_hidden_layers=4)


@pytest.fixture
def page(server: Any, context: BrowserContext, complaints: Complaints) -> Page:
    require_dashboard()
    page = context.new_page()
    complaints.listen(page)
    page.goto(f"{server.url}/#key={server.api_key}")
    page.get_by_role("heading", name="Machines", level=1).wait_for()
    return page


class Machines:
    """Machines that joined; those that a test leaves are there for the next one."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._running: dict[str, Any] = {}

    def join(self, page: Page, server: Any, run_command: Any, count: int) -> None:
        """Let machines join by the lines that the page gives, until so many are ready."""
        new = [next(NAMES) for _ in range(count - len(self._running))]
        for name in new:
            joining, variables = invite(page, name)
            command = run_command(server.data_folder, *joining, "--name", name, *LENT, **variables)
            self._running[name] = self._stack.enter_context(command)
            page.reload()
        page.goto(f"{server.url}/?view=table")
        for name in self._running:
            expect(page.get_by_role("row", name=re.compile(rf"\b{name}\b"))).to_contain_text(
                "ready", timeout=READY_MS
            )

    def kill(self, name: str) -> None:
        """Kill one of them."""
        kill(self._running.pop(name))


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(stack)


def invite(page: Page, label: str) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the variables of the line that an invite gives."""
    page.get_by_role("link", name="Invite", exact=True).click()
    page.get_by_label("For whom").fill(label)
    page.get_by_role("button", name="Create invite").click()
    line = page.get_by_label("Command to join")
    expect(line).to_contain_text("share-compute join")
    assignment, _, *arguments = shlex.split(line.inner_text())
    variable, _, code = assignment.partition("=")
    return arguments, {variable: code}


def test_a_job_submitted_by_the_form_survives_a_contributor(
    page: Page, server: Any, run_command: Any, machines: Machines
) -> None:
    machines.join(page, server, run_command, 3)
    page.get_by_role("link", name="Submit").click()
    page.get_by_label("Name", exact=True).fill("survivor")
    page.get_by_label("Steps", exact=True).fill(str(STEPS))
    page.get_by_text("YAML", exact=True).click()
    editor = page.get_by_label("Job as YAML")
    # So small a model is fastest on one machine, so it is divided only on request.
    editor.fill(f"{editor.input_value()}\nparallelism: {{stages: 2}}\n")
    expect(page.get_by_text("The server would accept this job.")).to_be_visible(timeout=READY_MS)
    page.get_by_role("button", name="Submit", exact=True).click()
    expect(page.get_by_role("heading", name="survivor", level=1)).to_be_visible()
    placement = page.get_by_role("figure", name=re.compile("Placement of 5 layers"))
    expect(placement).to_be_visible(timeout=READY_MS)
    expect(page.get_by_text(re.compile(r"Step [1-9]\d* of"))).to_be_visible(timeout=READY_MS)
    with server.client() as client:
        job = client.jobs(name="survivor").jobs[0]
        assert job.plan is not None
        doomed = job.plan.stages[1].members[0].name
        machines.kill(doomed)
        text = re.compile(rf"{doomed} lost;.* no step for")  # another machine may join at once
        expect(page.get_by_role("log")).to_contain_text(text, timeout=READY_MS)
        expect(placement).not_to_contain_text(re.compile(rf"^{doomed}"), timeout=READY_MS)
        expect(page.get_by_text(f"{STEPS} steps done.", exact=True)).to_be_visible(timeout=DONE_MS)
        done = client.job(job.id)
        assert done.plan is not None
        assert doomed not in {member.name for stage in done.plan.stages for member in stage.members}


@pytest.mark.thorough  # tests of serving have it without a browser, tests of the page without machines
def test_an_answer_goes_on_while_a_machine_dies(
    page: Page, server: Any, run_command: Any, machines: Machines, folder: Path
) -> None:
    machines.join(page, server, run_command, 2)
    with server.client() as client:
        client.deploy({"name": "poet", "model": {"path": str(folder)}, "parallelism": {"stages": 2}})
        page.goto(f"{server.url}/deployments/poet")
        expect(page.get_by_text("ready", exact=True)).to_be_visible(timeout=READY_MS)
        page.goto(f"{server.url}/playground?with=poet")
        page.locator("summary").click()
        page.get_by_label("Most tokens", exact=True).fill("400")
        page.get_by_label("Temperature", exact=True).fill("0")
        answer = page.get_by_role("region", name="Answer of poet").last
        page.get_by_label("Your message").fill("the quick brown fox")
        page.keyboard.press("Enter")
        expect(answer).to_contain_text("400 tokens", timeout=READY_MS)
        undisturbed = answer.get_by_test_id("answer").inner_text()
        deployment = wait_for(lambda: served(client, "poet", 2), "both stages")
        doomed = deployment.plans[0].stages[1].members[0].name
        answer.get_by_role("button", name="Regenerate").click()
        expect(answer.get_by_test_id("answer")).not_to_be_empty(timeout=READY_MS)
        machines.kill(doomed)
        mark = answer.get_by_role("note")
        expect(mark).to_contain_text(f"{doomed} was lost here; the answer continues", timeout=READY_MS)
        expect(answer).to_contain_text("400 tokens", timeout=READY_MS)
        whole = answer.get_by_test_id("answer").inner_text().replace(mark.inner_text(), "")
        assert "".join(whole.split()) == "".join(undisturbed.split())
        client.undeploy("poet")
