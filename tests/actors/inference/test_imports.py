"""The server of a replica starts fast, because it takes over members without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["server", "beginning", "member", "weights"])
def test_the_server_of_a_replica_imports_no_torch(module: str) -> None:
    program = f"""
import sys
import share_compute_actors.inference.{module}
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
