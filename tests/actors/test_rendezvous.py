"""Members of a group find each other through their channels, without asking a resolver for names."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.namespaces import alone, needs_namespaces


@needs_namespaces
def test_forming_a_group_asks_no_resolver(tmp_path: Path) -> None:
    script = Path(__file__).with_name("name_lookups.py")
    done = subprocess.run(
        alone([sys.executable, str(script), str(tmp_path)]),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("asked_on_purpose") >= 1
    assert found == {
        "sums": [3.0] * 3,
        "asked": 0,
        "sums_after_a_loss": [1.0] * 2,
        "asked_after_a_loss": 0,
    }
