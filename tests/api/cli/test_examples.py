"""The examples run as they are: a server accepts each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from share_compute_api.client.client import Client
from share_compute_api.client.job_file import read_submission

EXAMPLES = Path(__file__).parents[3] / "examples"
DEPLOYED = {"generate.yaml": ("poet", "base-model"), "embed.yaml": ("encoder", "encoder")}
FILES = sorted(file.name for file in EXAMPLES.glob("*.yaml"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples with the files that their own program writes."""
    folder = tmp_path_factory.getbasetemp() / "examples"
    shipped = {file.name for file in EXAMPLES.iterdir() if file.suffix in {".yaml", ".py"}} | {"topologies"}
    copytree(EXAMPLES, folder, ignore=lambda _, names: [name for name in names if name not in shipped])
    subprocess.run([sys.executable, folder / "prepare.py"], check=True, timeout=300)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_an_example_is_taken_as_shipped(served: Any, prepared: Path, name: str) -> None:
    with Client(served.url, served.api_key) as client:
        if name in DEPLOYED:
            deployed, folder = DEPLOYED[name]
            client.deploy({"name": deployed, "model": {"path": str(prepared / folder)}})
        job = client.submit(read_submission(prepared / name))
    assert job.state.value == "queued"
