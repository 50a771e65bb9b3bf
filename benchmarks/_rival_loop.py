"""Loop of a process that runs another program: requests and answers are lines of JSON on its standard streams.

The process runs in an environment of its own, so this module and the scripts that use it import nothing of
share-compute.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

Prepare = Callable[[list[list[int]], int], Callable[[], list[list[int]]]]
"""Function that takes prompts and a number of new tokens, and returns a function that generates the tokens. Only the
call of the latter is timed."""


@dataclass(frozen=True)
class Settings:
    """Settings of a rival's process."""

    folder: str
    """Folder of the model, a Llama in safetensors. A rival may write its own format there."""
    threads: int
    """Number of threads of each process that computes."""
    window: int
    """Longest sequence, prompt and answer together, in tokens."""
    sequences: int
    """Maximum number of concurrent sequences."""
    tokens: int
    """Maximum number of tokens of all concurrent sequences together."""
    servers: int = 0
    """Number of processes that the model is split over; 0 if it runs in this process."""


def answer_requests(start: Callable[[Settings], Prepare]) -> None:
    """Start a rival with the settings on the command line, and answer requests until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print to standard output, too
    prepare = start(Settings(**json.loads(sys.argv[1])))
    print("ready", file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        generate = prepare(request["prompts"], request["new"])
        start_s = time.perf_counter()
        texts = generate()
        print(json.dumps({"seconds": time.perf_counter() - start_s, "texts": texts}), file=answers)
