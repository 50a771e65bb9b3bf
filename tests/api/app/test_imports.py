"""A server starts fast, because streams of clients wait for it after its death."""

from __future__ import annotations

import subprocess
import sys


def test_the_app_does_not_import_what_most_starts_do_not_need() -> None:
    program = """
import sys
import share_compute_api.app.server, share_compute_api.app.app
print([name for name in ("torch", "transformers", "alembic", "pyarrow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
