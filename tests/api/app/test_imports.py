"""A server starts fast, because clients' streams wait for its restart after a crash."""

from __future__ import annotations

import gc
import subprocess
import sys

from share_compute.program import collecting_later


def test_the_app_does_not_import_what_most_starts_do_not_need() -> None:
    program = """
import sys
import share_compute_api.app.server, share_compute_api.app.app
print([name for name in ("torch", "transformers", "alembic", "pyarrow") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_client_does_not_import_the_database() -> None:
    program = "import sys, share_compute_api.client.client; print('sqlalchemy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_no_garbage_is_collected_while_a_server_imports_its_packages() -> None:
    before = gc.get_freeze_count()
    try:
        with collecting_later():
            assert not gc.isenabled()
            kept = [[number] for number in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(kept)
        assert not any(one is kept for one in gc.get_objects())  # later collections do not visit it
    finally:
        gc.unfreeze()
