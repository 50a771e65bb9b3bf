#!/usr/bin/env python3
"""An OCI runtime for sandboxes in which limits may not be raised: runc, without the limits that podman asks for."""

import json
import os
import sys
from pathlib import Path

for option, value in zip(sys.argv, sys.argv[1:], strict=False):
    name = {"--bundle": f"{value}/config.json", "-b": f"{value}/config.json", "--process": value, "-p": value}
    file = Path(name.get(option, ""))
    if file.is_file():
        config = json.loads(file.read_text())
        process = config.get("process", config)
        for limit in ("rlimits", "oomScoreAdj"):
            process.pop(limit, None)
        file.write_text(json.dumps(config))
os.execvp("runc", ["runc", *sys.argv[1:]])
