"""Watches a server while somebody attacks it: how soon it answers, and how much memory it takes."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import Self

import httpx
import psutil

MOST_HEALTH_S = 1.0
"""So soon /health answers, whatever is asked meanwhile, on a machine that has a processor for each program."""


class Watch:
    """Asks for the health of the server of this process until the block ends.

    Args:
        url: of the server.
        most_growth_bytes: by which its process may grow meanwhile.
    """

    def __init__(self, url: str, most_growth_bytes: int) -> None:
        self._url = url
        self._most_growth_bytes = most_growth_bytes
        self._process = psutil.Process()
        self._before_bytes = self._process.memory_info().rss
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.slowest_s = 0.0
        self.growth_bytes = 0
        self.answers = 0
        self._failure: Exception | None = None

    def _watch(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=30) as client:
                while not self._is_over.wait(0.02) or not self.answers:
                    begun_s = time.perf_counter()
                    client.get("/api/v1/health").raise_for_status()
                    self.slowest_s = max(self.slowest_s, time.perf_counter() - begun_s)
                    self.growth_bytes = max(
                        self.growth_bytes, self._process.memory_info().rss - self._before_bytes
                    )
                    self.answers += 1
        except httpx.HTTPError as failure:
            self._failure = failure

    def __enter__(self) -> Self:
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
        if failure is None:
            assert self._failure is None
            crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            assert self.slowest_s < MOST_HEALTH_S * crowd
            assert self.growth_bytes < self._most_growth_bytes
