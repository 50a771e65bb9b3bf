"""Texts are printed literally, whatever characters they contain."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.lifecycle.work import WorkSums
from share_compute_api.agent.agent import AgentStatus
from share_compute_api.app.server import Running
from share_compute_api.cli.contributor.showing import ChangeLines, JsonLines, agent_table
from share_compute_api.cli.operator.up import server_text
from share_compute_api.cli.submitter import following
from share_compute_api.schemas.agents import ContributedWork, ContributorWork, MachineLimits
from share_compute_api.schemas.utilization import Utilization


def shown(renderable: RenderableType, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_url_with_an_ipv6_address():
    url = "https://[fd00::1]:8700"
    running = Running(url, None, (), "code", f"share-compute join {url}", Path(), "")
    text = shown(server_text(running, ()))
    assert f"{url}/#code=code" in text
    assert f"join {url}" in text
    assert "Let a machine join" in text


def test_a_server_for_its_own_machine_alone_says_how_others_join():
    url = "https://127.0.0.1:8700"
    running = Running(url, None, (), "code", f"CODE=abc share-compute join {url}", Path(), "")
    assert "--host 0.0.0.0" in shown(server_text(running, ()))


def test_a_phase_with_brackets():
    view = AgentStatus(
        "ada", "http://[fd00::1]:8700", "waits for [/x]", datetime.now(UTC), warnings=("no resolver",)
    )
    text = shown(agent_table(view))
    assert "waits for [/x]" in text
    assert view.url in text
    assert "no resolver" in text


def test_the_display_of_a_machine_has_what_it_measured():
    used = Utilization(cpu_fraction=0.83, host_cpu_fraction=0.9, cpu_celsius=61.2, sent_bytes_per_s=2e6)
    lent = MachineLimits(
        memory_bytes=2**30,
        cpu_threads=2,
        host_threads=8,
        device="cuda",
        devices=2,
        upload_bytes_per_s=1_250_000,
    )
    view = AgentStatus("ada", "http://192.0.2.1", "ready", datetime.now(UTC), lent=lent, utilization=used)
    text = shown(agent_table(view))
    assert "1.0 GiB of memory  2 of 8 CPU threads  2 NVIDIA GPUs  sends at most 1.2 MB/s\n" in text
    assert re.search(r"share-compute +CPU 83% +\n", text)
    assert re.search(r"all programs +CPU 90%  temperature 61 °C  sends 2.0 MB/s +\n", text)
    assert "Ctrl-C leaves" in text
    assert "Ctrl-C ends at once" in shown(agent_table(replace(view, phase="draining")))
    assert "Ctrl-C" not in shown(agent_table(replace(view, phase="left")))


def test_a_machine_without_a_terminal_prints_a_dated_line_for_each_change(
    capsys: pytest.CaptureFixture[str],
):
    show, now = ChangeLines(), datetime.now(UTC)
    for phase, warnings in (("joins", ()), ("joins", ()), ("ready [/x]", ("no resolver",))):
        show(AgentStatus("ada", "http://192.0.2.1", phase, now, warnings=warnings))
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ada  joins", first)
    assert second.endswith("  ada  ready [/x]; warning: no resolver")


def test_the_job_of_a_machine_has_its_name_and_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    work = ContributorWork(
        state=ContributorState.ready, reason="", job="job-1", job_name="poet", shard="layer 0 of 3",
        tokens_per_s=None, wanted="run",
    )  # fmt: skip
    view = AgentStatus("ada", "http://192.0.2.1", "working", datetime.now(UTC), work=work)
    assert "layer 0 of 3 of poet (job-1)" in shown(agent_table(view), width=80)
    ChangeLines()(view)
    assert "holds layer 0 of 3 of poet (job-1)" in capsys.readouterr().out


@pytest.mark.parametrize("is_first", [True, False])
def test_a_stay_ends_with_what_the_machine_contributed(
    capsys: pytest.CaptureFixture[str], *, is_first: bool
) -> None:
    before = WorkSums(seconds=0, steps=0, microbatches=0, samples=0)
    stay = WorkSums(seconds=192, steps=40, microbatches=160, samples=1280)
    if not is_first:
        before = WorkSums(seconds=7200, steps=0, microbatches=0, samples=0)
    total = WorkSums(**{name: value + getattr(before, name) for name, value in stay})
    contributed = ContributedWork.begin(before).until(total)
    view = AgentStatus("ada", "http://192.0.2.1", "left", datetime.now(UTC), contributed=contributed)
    table = shown(agent_table(view), width=80)
    assert "40 steps, 1,280 samples, in 3 min 12 s of work" in table
    assert ("in 2 h 3 min of work" in table) is not is_first
    assert "job's speed" not in table
    ChangeLines()(view)
    (line,) = capsys.readouterr().out.splitlines()
    stays = "" if is_first else "; in all stays: 40 steps, 1,280 samples, in 2 h 3 min of work"
    assert line.endswith(f"  ada  left; contributed: 40 steps, 1,280 samples, in 3 min 12 s of work{stays}")
    JsonLines()(view)
    printed = json.loads(capsys.readouterr().out)["contributed"]
    assert (printed["this_stay"]["steps"], printed["in_all"]["seconds"]) == (40, total.seconds)


def test_a_server_that_lost_records_takes_nothing_from_a_stay() -> None:
    first, second, lost = (
        WorkSums(seconds=seconds, steps=steps, microbatches=steps, samples=steps)
        for seconds, steps in ((100, 10), (110, 12), (50, 3))
    )
    contributed = ContributedWork.begin(first).until(second).until(lost)
    assert (contributed.this_stay.steps, contributed.in_all.steps) == (2, 3)


def test_a_reason_with_brackets(capsys: pytest.CaptureFixture[str]):
    job: Any = SimpleNamespace(state=JobState.failed, reason="no file [/x]", error=None, id="job-1")
    following.show_end(job)
    out = capsys.readouterr().out
    assert "no file [/x]" in out
    assert "next        try again: share-compute resume job-1" in out
