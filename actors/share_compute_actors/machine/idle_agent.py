"""Replaces an agent that a raylet starts and requires, but that share-compute does not use.

Run as ``python -S -s -P idle_agent.py FOLDER NODE_ID NAME=PORT...``. The raylet reads the ports from files in the
session folder ``FOLDER``, and ends when the agent ends. Ray's own agents import for half a second each before they
write these files. See `ray_start`.
"""

from __future__ import annotations

import os
import sys
import time

_POLL_S = 1.0


def write_ports(folder: str, node_id: str, ports: list[str]) -> None:
    """Write the files with the agent's ports, each given as ``NAME=PORT``; the port is -1 if nothing listens."""
    for each in ports:
        name, _, port = each.partition("=")
        file = os.path.join(folder, f"{name}_{node_id}")  # noqa: PTH118 - pathlib costs a third of this start
        with open(f"{file}.new", "w", encoding="ascii") as written:  # noqa: PTH123
            written.write(port)
        os.replace(f"{file}.new", file)  # noqa: PTH105


def main() -> None:
    """Write the ports, and wait for the end of the raylet, which may have ended already."""
    raylet = int(os.environ["RAY_RAYLET_PID"])  # Ray's agents read it, too
    write_ports(sys.argv[1], sys.argv[2], sys.argv[3:])
    while os.getppid() == raylet:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
