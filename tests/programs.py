"""Programs and packages that tests use. Without one, tests skip locally, and fail in continuous integration."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Generator
from typing import Any

import pytest

_MISSING = "missing program: "
_REASON = re.compile(re.escape(_MISSING) + "(.+)")


def is_strict() -> bool:
    """Return whether a missing program is a failure: in continuous integration, which sets ``CI``."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def missing(*programs: str) -> str:
    """Return the skip reason for missing programs; `pytest_runtest_makereport` recognizes its first words."""
    return f"{_MISSING}{', '.join(programs)}"


def require(program: str, *alternatives: str) -> str:
    """Return the path of a program, or of one of its alternatives; skip the test if there is none."""
    for name in (program, *alternatives):
        if path := shutil.which(name):
            return path
    pytest.skip(missing(program))


def require_package(name: str) -> Any:
    """Return the imported package; skip the test if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as failure:
        if failure.name != name:
            raise
    pytest.skip(missing(name))


def _reason(report: pytest.TestReport) -> str | None:
    """Return the programs whose lack made a test skip; None if it ran, or skipped for another reason."""
    found = _REASON.search(report.longrepr[2]) if isinstance(report.longrepr, tuple) else None
    return found and found[1]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and is_strict() and (programs := _reason(report)):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} needs {programs}, which continuous integration must have"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print in one line which programs were missing, and how many tests did not run without them."""
    lacking = [
        programs for report in terminalreporter.stats.get("skipped", ()) if (programs := _reason(report))
    ]
    if lacking:
        names = ", ".join(sorted({name for programs in lacking for name in programs.split(", ")}))
        terminalreporter.write_line(f"{len(lacking)} tests did not run: {names} not installed", yellow=True)
