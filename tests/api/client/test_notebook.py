"""The example notebook runs as shipped: its cells in order, against a server whose jobs a test plays."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.api.client.test_python_client import finish
from tests.api.conftest import Plane

from share_compute.lifecycle.states import JobState

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> None:
    """Run a cell as Jupyter does, which allows ``await`` outside of functions."""
    code = compile(source, NOTEBOOK.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, names)
    if inspect.iscoroutine(done):
        asyncio.run(done)


def test_the_notebook_runs(plane: Plane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHARE_COMPUTE_URL", plane.url)
    monkeypatch.setenv("SHARE_COMPUTE_API_KEY", plane.api_key)
    monkeypatch.setenv("SHARE_COMPUTE_DATA_FOLDER", str(tmp_path / "elsewhere"))
    is_over = threading.Event()

    def play() -> None:
        while not is_over.wait(0.02):
            for job in plane.store.jobs.queued():
                finish(plane, job.id)

    machines = threading.Thread(target=play)
    machines.start()
    names: dict[str, Any] = {}
    try:
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                run_cell("".join(cell["source"]), names)
    finally:
        is_over.set()
        machines.join()
    assert names["job"].state is JobState.succeeded
    assert names["runs"]["training.optimizer.learning_rate"].tolist() == [0.01, 0.1]
