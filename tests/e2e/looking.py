"""Pages in the light and in the dark, on a desk and on a phone: pictures of them, and what axe holds against them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from tests.e2e.conftest import Complaints

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
LOCALES = {"en": "en-GB", "zh": "zh-CN"}

LOOKS = pytest.mark.parametrize(
    ("language", "scheme", "width"),
    [
        ("en", "light", 1200),
        ("zh", "dark", 390),
        pytest.param("en", "light", 390, marks=pytest.mark.thorough),
        pytest.param("zh", "dark", 1200, marks=pytest.mark.thorough),
        pytest.param("en", "dark", 390, marks=pytest.mark.thorough),
        pytest.param("zh", "light", 1200, marks=pytest.mark.thorough),
    ],
)
"""How pages are looked at: in two languages, in the light and in the dark, on a desk and on a phone."""
PLAIN_LOOKS = pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 1200),
        ("dark", 390),
        pytest.param("light", 390, marks=pytest.mark.thorough),
        pytest.param("dark", 1200, marks=pytest.mark.thorough),
    ],
)
"""The same in English alone."""


@dataclass
class Looks:
    """What was seen of pages, in one window."""

    page: Page
    folder: Path
    """For pictures."""
    found: dict[str, list[str]] = field(default_factory=dict)

    def take(self, name: str) -> None:
        """Keep a picture of what the window shows and what axe finds there; it must not be wider than the window."""
        picture = re.sub(r"\W+", "-", name).strip("-") or "pool"
        self.page.screenshot(path=self.folder / f"{picture}.png", full_page=True)
        self.found[name] = violations(self.page)
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"


@contextmanager
def looking(
    browser: Browser, folder: Path, complaints: Complaints, *, scheme: Any, width: int, **options: Any
) -> Iterator[Looks]:
    """Open a window for the block; axe must have found nothing in it."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: npm ci in web/")
    viewport = {"width": width, "height": 800}
    context = browser.new_context(color_scheme=scheme, viewport=viewport, **options)
    page = context.new_page()
    complaints.listen(page)
    looks = Looks(page, folder)
    yield looks
    context.close()
    found = {name: some for name, some in looks.found.items() if some}
    assert not found, found


def violations(page: Page) -> list[str]:
    """Return what axe finds against WCAG 2.2 AA, with the elements."""
    page.evaluate(AXE.read_text())
    answer = page.evaluate("tags => axe.run(document, {runOnly: tags})", _TAGS)
    return [f"{one['id']}: {node['html'][:160]}" for one in answer["violations"] for node in one["nodes"]]
