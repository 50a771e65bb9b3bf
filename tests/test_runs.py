"""How the tests run: missing programs, tests that are repeated, and the targets that tests belong to."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.quarantine import QUARANTINE, why_never_repeated

ROOT = Path(__file__).parents[1]
SKIPPING = """
import pytest
from tests.programs import missing, require, require_package

def test_by_call():
    require("no-such-program", "nor-such")

def test_by_import():
    require_package("no_such_package")

@pytest.mark.skipif(True, reason=missing("another"))
def test_by_mark():
    pass

@pytest.mark.skipif(True, reason="there is no GPU")
def test_on_a_gpu():
    pass
"""


def run(folder: Path, ci: str) -> subprocess.CompletedProcess[str]:
    """Run four tests that skip, three of them for want of a program or package."""
    (folder / "pytest.ini").touch()
    (folder / "test_skips.py").write_text(SKIPPING)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.programs",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            folder,
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path},
    )


def test_where_programs_are_missing_tests_skip_and_one_line_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, ci="")
    assert done.returncode == 0, done.stdout
    assert "4 skipped" in done.stdout
    assert "3 tests did not run: another, no-such-program, no_such_package not installed" in done.stdout


def test_in_continuous_integration_programs_must_not_be_missing(tmp_path: Path) -> None:
    done = run(tmp_path, ci="1")
    assert done.returncode == 1, done.stdout
    assert "2 failed, 1 skipped, 1 error" in done.stdout
    for name in ("no-such-program", "no_such_package"):
        assert f"needs {name}, which continuous integration must have" in done.stdout


def test_tests_in_quarantine_exist_and_have_a_reason_and_an_owner() -> None:
    for test_id, case in QUARANTINE.items():
        file, *_, name = test_id.split("::")
        functions = (node for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "args"))
        assert name in {getattr(function, "name", None) for function in functions}, test_id
        assert case.reason, test_id
        assert case.owner, test_id


@pytest.mark.parametrize(
    ("test_id", "markers"),
    [
        ("tests/chaos/test_recovery.py::test_members_killed_at_any_point", ["chaos"]),
        ("tests/platform/protocol/test_world.py::test_anything", []),
        ("tests/api/openai/test_serving.py::test_text_goes_on_when_a_machine_dies", ["slow", "exact"]),
    ],
)
def test_tests_that_compare_bits_tokens_or_steps_are_never_repeated(test_id: str, markers: list[str]) -> None:
    assert why_never_repeated(test_id, markers)


def test_tests_of_pages_may_be_in_quarantine() -> None:
    assert why_never_repeated("tests/e2e/test_job.py::test_samples_come_while_it_trains", ["browser"]) is None
