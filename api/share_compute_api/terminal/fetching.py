"""Waits while the server fetches a model from the Hugging Face Hub."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from rich.markup import escape

from share_compute.errors import FetchUnderWay
from share_compute_api.terminal.output import console

_PAUSE_S = 3
Result = TypeVar("Result")


def once_fetched(
    send: Callable[[], Result], *, as_json: bool, note: Callable[[str], None] | None = None
) -> Result:
    """Return the result of a request; repeat the request while the server still fetches its model.

    Args:
        send: sends the request.
        as_json: whether to wait without showing progress.
        note: shows a line of progress; None to print a separate line.
    """
    with ExitStack() as shown:
        status = None
        while True:
            try:
                return send()
            except FetchUnderWay as waiting:
                if note is not None and not as_json:
                    note(waiting.message)
                elif status is None and not as_json:
                    status = shown.enter_context(console.status(""))
                if status is not None:
                    status.update(escape(waiting.message))
                time.sleep(waiting.details.get("retry_after_s", _PAUSE_S))
