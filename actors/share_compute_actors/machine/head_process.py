"""Runs ``ray start --head`` so that its GCS is started again in place when it ends.

Run as ``python -m share_compute_actors.machine.head_process SCRIPT start --head ...``. Without this program, Ray ends
the whole head when the GCS ends, and with the head all coordinators. Nodes, drivers and actors wait for a GCS that
returns at the same port with the same tables, and then continue: see "GCS fault tolerance" in Ray's documentation.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from ray._private import services
from ray.scripts import scripts

SOUND_S = 5
"""Shortest time in seconds that a GCS must have run to be started again when it ends.

A GCS that ends sooner has a lasting problem, such as damaged tables, so the head ends with it."""
_SCRIPT = """\
#!/bin/sh
# Starts Ray's GCS again when it ends, unless it was told to end.
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
    """Write the supervising script, and run Ray's command line so that it starts this script instead of the GCS."""
    script = Path(sys.argv.pop(1))
    program = shlex.quote(services.GCS_SERVER_EXECUTABLE)
    script.write_text(_SCRIPT.format(program=program, sound_s=SOUND_S))
    script.chmod(0o700)
    services.GCS_SERVER_EXECUTABLE = str(script)
    scripts.main()


if __name__ == "__main__":
    main()
