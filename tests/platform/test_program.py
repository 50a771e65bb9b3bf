"""Programs run as if Python had started them directly, and collect garbage rarely."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from share_compute.program import PROGRAM, command_of

TEXT = """
import gc, json, sys
facts = {"name": __name__, "words": sys.argv, "first": gc.get_threshold()[0], "path": sys.path[0]}
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
    assert facts["first"] == 20_000
    if starts_with == "file":
        assert facts["path"] == str(tmp_path)


def test_a_safe_path_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "needed.py").write_text("")
    file = tmp_path / "programs" / "told.py"
    file.parent.mkdir()
    file.write_text("import needed")
    paths = {"PYTHONPATH": f"{tmp_path}:{':'.join(filter(None, sys.path))}", "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, PROGRAM, str(file)], env=paths, check=True)
