"""Jobs start fast, because their actors do not import packages that the job does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_coordinator_of_declared_layers_on_lines_of_text_imports_little(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("a line\n")
    program = """
import sys
from pathlib import Path
import share_compute_actors.training.coordinator.attempt, share_compute_actors.training.rounds.beginning
import share_compute_actors.training.rounds.synchronizer, share_compute_actors.training.shard_store
from share_compute.data.reading import read_pieces
assert next(read_pieces([Path(sys.argv[1])], "text")).text
slow = ("transformers", "torch._dynamo", "torch.distributed.tensor", "sympy", "sklearn", "pyarrow", "pandas")
print([name for name in slow if name in sys.modules])
"""
    command = [sys.executable, "-c", program, str(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
