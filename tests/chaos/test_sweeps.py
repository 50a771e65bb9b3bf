"""A sweep on real machines: trials train one after another, and the sweep outlives the server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.chaos.test_server_takeover import join_command, ready
from tests.held_ports import HeldPort

from share_compute.lifecycle.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

RATE = "training.optimizer.learning_rate"
SWEEP = {
    "kind": "sweep",
    "name": "rates",
    "job": {
        "model": {"layers": [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]},
        "data": {"dataset": "digits"},
        "training": {"steps": 60, "batch_size": 64, "validate_every": 10, "schedule": {"name": "constant"}},
    },
    # The last trial has a tiny learning rate, so it is worse than the others at each comparison.
    "fields": {RATE: {"values": [0.01, 0.003, 0.001, 1e-7]}},
    "early_stopping": {"first": 20, "factor": 2},
    "jobs_at_once": 2,
}


@pytest.mark.thorough
def test_a_sweep_outlives_the_server(
    tmp_path: Path, run_server: Any, run_command: Any, wait_for: Callable[..., Any]
) -> None:
    port = HeldPort()
    with ExitStack() as servers, ExitStack() as machines:
        server = servers.enter_context(run_server(tmp_path, port=port.number))
        with server.client() as client:
            for name in ("ada", "bob"):
                machines.enter_context(run_command(tmp_path, *join_command(client, server.url, name)))
            wait_for(lambda: ready(client) == ["ada", "bob"], "two machines")
            sweep_id = client.submit(SWEEP).id
            wait_for(lambda: client.job(sweep_id).step >= 1, "the end of a trial")
            before = {one.number: one.job_id for one in client.trials(sweep_id).trials if one.job_id}
            psutil.Process(server.command.process.pid).kill()
            server.command.process.wait()
            server = servers.enter_context(run_server(tmp_path, port=port.number))
            wait_for(lambda: client.job(sweep_id).state.is_final, "the end of the sweep", 600)
            over, view = client.job(sweep_id), client.trials(sweep_id)
            assert (over.state, over.step) == (JobState.succeeded, 4)
            assert {number: job for number, job in _jobs(view).items() if number in before} == before
            assert all(one.rungs for one in view.trials)
            worst = next(one for one in view.trials if one.number == 4)
            assert [rung.is_kept for rung in worst.rungs] == [False]
            assert view.trials[0].number == view.best != 4
            assert view.trials[0].state is JobState.succeeded
            assert all(client.job(one.job_id or "").state.is_final for one in view.trials)


def _jobs(view: Any) -> dict[int, str]:
    return {one.number: one.job_id for one in view.trials}
