"""Measures the processor time and memory growth of a server during an attack."""

from __future__ import annotations

import gc
import threading
import time
from types import TracebackType
from typing import Self

import httpx
import psutil

MOST_BUSY_S = 1.0
"""Processor seconds that the server's process may take before /health answers, during any request.

On an otherwise idle machine this is the client's waiting time. Wall-clock time would count other programs as well.
"""


class Watch:
    """Polls the health of the server of this process until the block ends.

    Args:
        url: of the server.
        most_growth_bytes: maximum growth of its process meanwhile.
    """

    def __init__(self, url: str, most_growth_bytes: int) -> None:
        self._url = url
        self._most_growth_bytes = most_growth_bytes
        self._process = psutil.Process()
        self._before_bytes = self._process.memory_info().rss
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.busiest_s = 0.0
        self.growth_bytes = 0
        self.answers = 0
        self._failure: Exception | None = None

    def _watch(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=60) as client:
                while not self._is_over.wait(0.02) or not self.answers:
                    busy_s = time.process_time()
                    client.get("/api/v1/health").raise_for_status()
                    self.busiest_s = max(self.busiest_s, time.process_time() - busy_s)
                    self.growth_bytes = max(
                        self.growth_bytes, self._process.memory_info().rss - self._before_bytes
                    )
                    self.answers += 1
        except httpx.HTTPError as failure:
            self._failure = failure

    def __enter__(self) -> Self:
        # This process also holds the objects of all earlier tests, so a collection would take a second.
        gc.collect()
        gc.freeze()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        gc.unfreeze()
        if failure is None:
            assert self._failure is None
            assert self.busiest_s < MOST_BUSY_S, f"busy for {self.busiest_s} s"
            assert self.growth_bytes < self._most_growth_bytes, f"{self.growth_bytes} bytes more"
