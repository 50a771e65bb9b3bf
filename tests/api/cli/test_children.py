"""The end of long-running commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import os, signal
from pathlib import Path
from share_compute_actors.machine.processes import ChildProcesses
from share_compute_api.terminal.children import Interrupts

class Failing(ChildProcesses):
    def kill_all(self):
        raise RuntimeError

with Interrupts() as interrupts:
    interrupts.takes_along(Failing(Path({folder!r})))
    interrupts.begin_stopping()
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_a_forced_end_comes_even_if_killing_fails(tmp_path: Path):
    code = CODE.format(folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=90, check=False)
    assert done.returncode == 130
