"""Programs run as if they had been started themselves, and collect garbage rarely."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from share_compute.program import PROGRAM, command_of

TEXT = """
import gc, json, sys
facts = {"name": __name__, "words": sys.argv, "first": gc.get_threshold()[0]}
if __name__ == "__main__":
    print(json.dumps(facts))
    sys.exit(3)
"""


@pytest.mark.parametrize("starts_with", ["module", "file"])
def test_a_program_gets_its_arguments_and_gives_its_status(tmp_path: Path, starts_with: str) -> None:
    file = tmp_path / "told.py"
    file.write_text(TEXT)
    command = (
        command_of("told", "a b", "--json")
        if starts_with == "module"
        else [sys.executable, PROGRAM, str(file), "a b", "--json"]
    )
    paths = {"PYTHONPATH": f"{tmp_path}:{':'.join(filter(None, sys.path))}"}
    done = subprocess.run(command, capture_output=True, text=True, env=paths, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    facts = json.loads(done.stdout)
    assert (facts["name"], facts["words"]) == ("__main__", [str(file), "a b", "--json"])
    assert facts["first"] > 700
