"""Runs ``ray start --head`` without Ray's dashboard, and with a supervisor that restarts the GCS when the GCS ends.

Run as ``python -m share_compute_actors.machine.head_process SCRIPT start --head ...``. Without the supervisor, Ray ends
the whole head, with all coordinators, when the GCS ends. Nodes, drivers and actors wait until a GCS with the same port
and tables runs, and then continue: see "GCS fault tolerance" in Ray's documentation.

Nothing here uses Ray's dashboard. ``ray start --head`` starts its process even with ``--include-dashboard=false``, and
waits for it.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from ray._private import services
from ray.scripts import scripts

SOUND_S = 5
"""Minimum time in seconds that a GCS must have run to be restarted when it ends.

A GCS that ends sooner has a lasting problem, such as damaged tables, so the supervisor and the head end, too."""
_SCRIPT = """\
#!/bin/sh
# Restarts Ray's GCS when it ends, unless this script received SIGTERM or SIGINT.
trap 'ended=1; kill -TERM "$gcs" 2>/dev/null' TERM INT
while :; do
  began=$(date +%s)
  {program} "$@" &
  gcs=$!
  wait "$gcs"; status=$?
  [ -n "$ended" ] && {{ wait "$gcs"; exit "$status"; }}
  [ $(($(date +%s) - began)) -lt {sound_s} ] && exit "$status"
done
"""


def main() -> None:
    """Write the supervising script, and run Ray's command line with this script as the GCS and without a dashboard."""
    script = Path(sys.argv.pop(1))
    program = shlex.quote(services.GCS_SERVER_EXECUTABLE)
    script.write_text(_SCRIPT.format(program=program, sound_s=SOUND_S))
    script.chmod(0o700)
    services.GCS_SERVER_EXECUTABLE = str(script)
    services.start_api_server = _start_no_api_server
    scripts.main()


def _start_no_api_server(*_: Any, **__: Any) -> tuple[None, None]:
    """Return Ray's answer for a dashboard that was not started: no URL and no process."""
    return None, None


if __name__ == "__main__":
    main()
