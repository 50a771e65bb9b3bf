"""The listener works whichever packages are installed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from share_compute_api.client.client import Client


def test_an_installed_uvloop_is_not_used(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transports lack the class that the listener requires, so every connection was reset."""
    monkeypatch.setitem(sys.modules, "uvloop", ModuleType("uvloop"))  # without a loop
    plane.restart()
    with Client(plane.url, plane.api_key) as client:
        assert client.health().status
