"""Commands in a network namespace of their own, which nothing outside can reach."""

import shutil
import subprocess
from collections.abc import Sequence

import pytest
from tests.programs import missing

ALONE = ("unshare", "--net", "--mount")


def _why_not() -> str:
    """Return why no network namespace can be made here; empty if one can."""
    if lacking := [program for program in ("unshare", "ip") if shutil.which(program) is None]:
        return missing(*lacking)
    made = subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0
    return "" if made else "network namespaces cannot be made here: that takes Linux and root"


_REASON = _why_not()
needs_namespaces = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def alone(command: Sequence[str], *setup: str) -> list[str]:
    """Return a command that runs another one in a network namespace of its own.

    Args:
        command: what is run.
        setup: arguments of ``ip`` that are run before it, each in one string.
    """
    script = "".join(f"ip {arguments} && " for arguments in ("link set lo up", *setup)) + 'exec "$@"'
    return [*ALONE, "sh", "-c", script, "sh", *command]
