"""Processes of other programs that generate text, each in the environment of its own interpreter."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from _rival_loop import Settings

_MESSAGE_CHARACTERS = 4000
"""Number of characters of a process's messages that an error repeats."""
_END_S = 60.0


class RivalProgram:
    """A process that generates text with another program.

    Args:
        python: interpreter of an environment that has the program.
        script: script in this folder that calls `answer_requests`.
        settings: settings of the process.
        log: file for the process's messages.

    Raises:
        RuntimeError: the process ended.
    """

    def __init__(self, python: str, script: str, settings: Settings, log: Path) -> None:
        self._script, self._log = script, log
        # -E: environment variables for this interpreter, such as PYTHONPATH, are not meant for the other one.
        command = [python, "-E", str(Path(__file__).with_name(script)), json.dumps(vars(settings))]
        with log.open("w") as messages:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, text=True
            )
        self._read()

    @property
    def pid(self) -> int:
        """Process id; the process may have children."""
        return self._process.pid

    def generate(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Return the seconds that ``new`` tokens after each prompt took, and the tokens.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "new": new}), file=self._process.stdin, flush=True)
        answer = json.loads(self._read())
        return answer["seconds"], answer["texts"]

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            messages = self._log.read_text(errors="replace")[-_MESSAGE_CHARACTERS:]
            raise RuntimeError(f"{self._script} exited with code {code}:\n{messages}")
        return line

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
