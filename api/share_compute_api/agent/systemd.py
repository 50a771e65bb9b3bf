"""The systemd user unit that lends a machine to a server after each boot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from share_compute.errors import Unavailable
from share_compute_api.terminal.children import own_command

GRACE_S = 30
"""Time that agents get to end in addition to their ``leave_within_s``, in seconds; then they are killed."""
RETRY_S = 30
"""Pause before an agent that failed is started again, in seconds."""


def unit_name(machine: str) -> str:
    """Return the name of a machine's systemd unit."""
    return f"share-compute-{machine}.service"


def unit_file(machine: str) -> Path:
    """Return the path at which systemd looks for a machine's unit."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(configuration).expanduser() / "systemd" / "user" / unit_name(machine)


def unit_text(arguments: list[str], url: str, data_folder: Path, leave_within_s: float) -> str:
    """Return the text of the unit.

    systemd restarts the service after a failure, but not after exit code 2 (wrong options) or 5 (the server refuses the
    machine, for example because the operator removed it). To stop the service, systemd sends SIGTERM only to the main
    process.

    Args:
        arguments: arguments of ``share-compute``.
        url: URL of the server.
        data_folder: folder with the machine's key.
        leave_within_s: time limit for moving the shards to other machines, in seconds.
    """
    command = " ".join(map(_quoted, own_command(*arguments)))
    return f"""[Unit]
Description=Lend this machine to {url.replace("%", "%%")}
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Environment={_quoted(f"SHARE_COMPUTE_DATA_FOLDER={data_folder}", is_command=False)}
UMask=0077
Restart=on-failure
RestartSec={RETRY_S}
RestartPreventExitStatus=2 5
KillMode=mixed
TimeoutStopSec={leave_within_s + GRACE_S:.0f}

[Install]
WantedBy=default.target
"""


def install(machine: str, text: str) -> str | None:
    """Write a unit, start it, and enable it at boot; return a warning if it starts only after a login, else None."""
    file = unit_file(machine)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    systemctl("daemon-reload")
    systemctl("enable", unit_name(machine))
    systemctl("restart", unit_name(machine))
    lingers = shutil.which("loginctl") is not None and _run("loginctl", "enable-linger").returncode == 0
    return None if lingers else "it starts when you log in; at boot after: sudo loginctl enable-linger $USER"


def uninstall(machine: str) -> bool:
    """Stop and remove a unit; return whether there was one."""
    file = unit_file(machine)
    if not file.exists():
        return False
    systemctl("disable", "--now", unit_name(machine))
    file.unlink()
    systemctl("daemon-reload")
    return True


def systemctl(*words: str) -> str:
    """Run ``systemctl --user`` and return its output.

    Raises:
        Unavailable: there is no systemd for this user, or the command failed.
    """
    if shutil.which("systemctl") is None:
        raise Unavailable(
            "this machine has no systemd", hint="run `share-compute join` from another supervisor of services"
        )
    done = _run("systemctl", "--user", *words)
    if done.returncode != 0:
        raise Unavailable(
            f"systemctl --user {' '.join(words)} failed: {done.stderr.strip() or done.returncode}",
            hint="log in as this user itself, not by su or sudo: systemd must run for it",
        )
    return done.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _quoted(word: str, *, is_command: bool = True) -> str:
    """Quote a word for a unit file.

    Escape `%`, which begins a specifier, and in commands also `$`, which begins a variable.
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped.replace("$", "$$") if is_command else escaped}"'
