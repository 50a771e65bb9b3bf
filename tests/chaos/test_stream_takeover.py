"""Streams of a served model survive the server: after its restart clients continue them, character by character."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.api.speaking import make_llama
from tests.conftest import descendants, run_contributor, served
from tests.held_ports import HeldPort

from share_compute_api.client.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.exact]
OPTIONS = {"max_tokens": 300, "temperature": 0.8, "ignore_eos": True}


def ask(client: Client, number: int, pieces: list[str]) -> None:
    """Add the pieces of one stream to a list."""
    for piece in client.complete("llama", f"the quick brown fox {number}", seed=number, **OPTIONS):
        pieces.append(piece)  # noqa: PERF402 - another thread watches how the list grows


def test_streams_outlive_the_server(
    tmp_path: Path, run_server: Callable[..., Any], wait_for: Callable[..., Any]
) -> None:
    folder = make_llama(tmp_path / "files" / "model", window=512, hidden_size=64, num_hidden_layers=4)
    port = HeldPort()
    with ExitStack() as servers, ExitStack() as machines, ThreadPoolExecutor() as threads:
        server = servers.enter_context(
            run_server(tmp_path / "data", port=port.number, data_root=folder.parent)
        )
        joined = list(threads.map(lambda _: machines.enter_context(run_contributor(server)), range(2)))
        with server.client() as client:
            client.deploy({"name": "llama", "model": {"path": str(folder)}, "parallelism": {"stages": 2}})
            wait_for(lambda: served(client, "llama", 2), "both stages")
            (leader,) = descendants("ray::DeploymentServer", server.command.process.pid)
            # With Ray's niceness of 15, its start would take very long beside other programs.
            assert leader.nice() == psutil.Process(server.command.process.pid).nice()
            expected: list[list[str]] = [[], []]
            for number, pieces in enumerate(expected):
                ask(client, number, pieces)
            texts: list[list[str]] = [[], []]
            running = [threads.submit(ask, client, number, pieces) for number, pieces in enumerate(texts)]
            wait_for(lambda: all(len(pieces) > 20 for pieces in texts), "text of both streams")
            members = [descendants("ray::ServingMember", one.command.process.pid) for one in joined]
            server.command.process.kill()
            server.command.process.wait()
            before = [len(pieces) for pieces in texts]
            server = servers.enter_context(
                run_server(tmp_path / "data", port=port.number, data_root=folder.parent)
            )
            for one in running:
                one.result()
            assert ["".join(pieces) for pieces in texts] == ["".join(pieces) for pieces in expected]
            # The server was killed while the streams ran, and the same processes generated the rest.
            assert all(count < len(pieces) for count, pieces in zip(before, texts, strict=True))
            assert [descendants("ray::ServingMember", one.command.process.pid) for one in joined] == members
            client.undeploy("llama")
