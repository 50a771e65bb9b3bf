"""The program that builds and runs containers: docker with its compose plugin, or podman with podman-compose."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.programs import missing

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MIRROR = "http://deb.debian.org/debian"
PYTHON, POSTGRES = "docker.io/library/python:3.11-slim", "docker.io/library/postgres:17"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_PULL_S, _BUILD_S, _COMMAND_S = 120, 1500, 600
_BASE = "localhost/share-compute-test-base"


@dataclass(frozen=True)
class Engine:
    """Runs containers.

    Args:
        program: docker or podman.
        compose: the command of its compose.
        environment: variables that it needs beside those of this process.
    """

    program: str
    compose: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, timeout_s: float = _COMMAND_S) -> str:
        """Run the program, and return its output."""
        return self._run((self.program, *arguments), {}, timeout_s)

    def build(self, tag: str, folder: Path, **arguments: str) -> str:
        """Build an image with this machine's package index configuration; return its tag."""
        given = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        self.run(
            "build", "--network=host", "-t", tag, *given, *self._mounts(), str(folder), timeout_s=_BUILD_S
        )
        return tag

    def call_compose(self, variables: Mapping[str, str], *arguments: str) -> str:
        """Run compose on the project's own file."""
        file = str(ROOT / "docker-compose.yml")
        return self._run((*self.compose, "-f", file, *arguments), variables, _COMMAND_S)

    def _mounts(self) -> Iterator[str]:
        """Yield options that mount the pip and npm configuration of this machine into a build; docker has none."""
        if self.program != "podman":
            return
        output = subprocess.run(["pip", "config", "list"], capture_output=True, text=True, check=False).stdout
        files = [Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf"]
        indexes = [Path(name).parent for name in re.findall(r"file://(/[^\s']+)", output)]
        others = [Path(name) for name in re.findall(r"(?<![/\w])(/[^\s']+)", output)]
        authorities = os.environ.get("NODE_EXTRA_CA_CERTS")
        if authorities:
            others.append(Path(authorities))
            yield f"--env=NODE_EXTRA_CA_CERTS={authorities}"
        for path in sorted({path for path in (*files, *indexes, *others) if path.exists()}):
            inside = "/root/.config/pip/pip.conf" if path == files[1] else path
            yield f"--volume={path}:{inside}:ro"

    def _run(self, command: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> str:
        done = subprocess.run(
            command,
            env={**os.environ, **self.environment, **variables},
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
        return done.stdout


@contextmanager
def engine() -> Iterator[Engine]:
    """Yield the engine of this machine; skip the test if there is none."""
    with suppress(OSError, RuntimeError):
        docker = Engine("docker", ("docker", "compose"))
        docker.run("info")
        docker.run("compose", "version")
        yield docker
        return
    for program in ("podman", "podman-compose"):
        if shutil.which(program) is None:
            pytest.skip(missing(f"docker or {program}"))
    with tempfile.TemporaryDirectory(prefix="sc-podman-") as folder:
        limited = Path(folder) / "containers.conf"
        limited.write_text(
            '[engine]\nruntime = "limited"\n[engine.runtimes]\n'
            f'limited = ["{HERE / "oci_runtime.py"}"]\n[network]\nnetwork_backend = "netavark"\n'
        )
        failures = []
        for environment in ({}, {"CONTAINERS_CONF": str(limited)}):
            podman = Engine("podman", ("podman-compose",), environment)
            try:
                podman.run("run", "--rm", base(podman), "true")
            except RuntimeError as failure:
                failures.append(str(failure))
            else:
                yield podman
                return
        pytest.skip(f"podman runs no container here: {failures[-1]}")


def base(engine: Engine) -> str:
    """Return an image with Python: the one that the Dockerfile names, or a Debian if no registry answers."""
    if not _has(engine, PYTHON) and not _has(engine, _BASE):
        try:
            engine.run("pull", "--quiet", PYTHON, timeout_s=_PULL_S)
        except (RuntimeError, subprocess.TimeoutExpired):
            _import_debian(engine)
    return PYTHON if _has(engine, PYTHON) else _BASE


def database(engine: Engine) -> str:
    """Return an image with PostgreSQL."""
    if _has(engine, POSTGRES):
        return POSTGRES
    with suppress(RuntimeError, subprocess.TimeoutExpired):
        engine.run("pull", "--quiet", POSTGRES, timeout_s=_PULL_S)
        return POSTGRES
    return engine.build(f"{_BASE}-postgres", HERE / "database", BASE=base(engine))


def torch_index() -> str:
    """Return the package index of torch for builds; empty if pip's own configuration has one."""
    with suppress(httpx.HTTPError):
        if httpx.get(f"{TORCH_INDEX}/torch/", timeout=20).is_success:
            return TORCH_INDEX
    return ""


def _has(engine: Engine, image: str) -> bool:
    with suppress(RuntimeError):
        engine.run("image", "inspect", image)
        return True
    return False


def _import_debian(engine: Engine) -> None:
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.skip("no registry answers, and debootstrap cannot make a base image here")
    packages = "python3,python3-venv,python3-pip,ca-certificates"
    with tempfile.TemporaryDirectory(prefix="sc-debian-") as folder:
        making = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", folder, MIRROR]
        done = subprocess.run(making, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"debootstrap failed: {done.stdout[-500:]}")
        (Path(folder) / "usr/bin/python").symlink_to("python3")
        next(Path(folder).glob("usr/lib/python3.*/EXTERNALLY-MANAGED")).unlink()
        archive = f"{folder}.tar"
        try:
            subprocess.run(["tar", "-C", folder, "-cf", archive, "."], check=True)
            engine.run("import", archive, _BASE)
        finally:
            Path(archive).unlink(missing_ok=True)
