"""Commands in a network of their own, which nothing outside can reach."""

import shutil
import subprocess
from collections.abc import Sequence

import pytest

ALONE = ("unshare", "--net", "--mount")


def _can_be_made() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _can_be_made(), reason="network namespaces cannot be made here: that takes Linux, iproute2 and root"
)


def alone(command: Sequence[str], *setup: str) -> list[str]:
    """Return a command that runs another one in a network of its own.

    Args:
        command: what is run.
        setup: arguments of ``ip`` that are run before it, each in one string.
    """
    script = "".join(f"ip {arguments} && " for arguments in ("link set lo up", *setup)) + 'exec "$@"'
    return [*ALONE, "sh", "-c", script, "sh", *command]
