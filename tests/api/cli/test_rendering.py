"""Texts are printed literally, whatever characters they contain."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from share_compute.lifecycle.states import JobState
from share_compute_api.agent.agent import AgentStatus
from share_compute_api.app.server import Running
from share_compute_api.cli.contributor.join import ChangeLines, agent_table
from share_compute_api.cli.operator.up import server_text
from share_compute_api.cli.submitter import following
from share_compute_api.schemas.utilization import Utilization


def shown(renderable: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_a_url_with_an_ipv6_address():
    url = "http://[fd00::1]:8700"
    running = Running(url, None, (), "code", f"share-compute join {url}", Path(), "")
    text = shown(server_text(running, ()))
    assert f"{url}/#code=code" in text
    assert f"join {url}" in text
    assert "Let a machine join" in text


def test_a_server_for_its_own_machine_alone_says_how_others_join():
    url = "http://127.0.0.1:8700"
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
    used = Utilization(cpu_fraction=0.83, cpu_celsius=61.2, sent_bytes_per_s=2e6)
    view = AgentStatus("ada", "http://192.0.2.1", "ready", datetime.now(UTC), utilization=used)
    text = shown(agent_table(view))
    assert "CPU 83%  temperature 61 °C  sends 2.0 MB/s" in text
    assert "GPU" not in text
    assert "Ctrl-C leaves" in text
    assert "Ctrl-C again ends at once" in shown(agent_table(replace(view, phase="leaving")))
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


def test_a_reason_with_brackets(capsys: pytest.CaptureFixture[str]):
    job: Any = SimpleNamespace(state=JobState.failed, reason="no file [/x]", error=None, id="job-1")
    client: Any = None
    following.show_end(client, job)
    assert "no file [/x]" in capsys.readouterr().out
