"""Pages in light and dark, on a desktop and on a phone: accessibility checks by axe, and screenshots of failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page
from tests.e2e.conftest import Complaints
from tests.programs import missing
from tests.thoroughly import thoroughly

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
LOCALES = {"en": "en-GB", "zh": "zh-CN"}


def appearances(first: Literal["desk", "phone"], languages: Sequence[str] = ("en",)) -> pytest.MarkDecorator:
    """Parametrize by ``scheme`` and ``width`` of pages, and by ``language`` if there are several.

    Args:
        first: the combination that `make test` takes; `make chaos` takes all.
        languages: with ``desk`` the first one is taken, with ``phone`` the last one.
    """
    desk, phone = (languages[0], "light", 1200), (languages[-1], "dark", 390)
    chosen = desk if first == "desk" else phone
    others = [one for one in product(languages, ("light", "dark"), (1200, 390)) if one != chosen]
    known = 0 if len(languages) > 1 else 1
    return pytest.mark.parametrize(
        ("language", "scheme", "width")[known:],
        thoroughly([one[known:] for one in (chosen, *others)], quick=1),
    )


@dataclass
class PageChecks:
    """Checks of the pages that were opened in one window."""

    page: Page
    folder: Path
    """Receives screenshots of pages with problems."""
    found: dict[str, list[str]] = field(default_factory=dict)
    """Problems of each page that has some, by its name."""

    def check(self, name: str) -> None:
        """Run axe, and save a screenshot if it finds a violation, or the page is wider than the window."""
        found = violations(self.page)
        if not self.page.evaluate("document.documentElement.scrollWidth <= innerWidth"):
            found.append("the page is wider than the window")
        if found:
            picture = re.sub(r"\W+", "-", name).strip("-") or "cluster"
            self.page.screenshot(path=self.folder / f"{picture}.png", full_page=True)
            self.found[name] = found


@contextmanager
def checked_pages(
    browser: Browser, folder: Path, complaints: Complaints, *, scheme: Any, width: int, **options: Any
) -> Iterator[PageChecks]:
    """Open a window for the block; at its end no page must have had a problem."""
    if not AXE.is_file():
        pytest.skip(missing("axe-core (npm ci in web/)"))
    viewport = {"width": width, "height": 800}
    context = browser.new_context(color_scheme=scheme, viewport=viewport, **options)
    page = context.new_page()
    complaints.listen(page)
    checks = PageChecks(page, folder)
    yield checks
    context.close()
    assert not checks.found, checks.found


def violations(page: Page) -> list[str]:
    """Return the violations of WCAG 2.2 AA that axe finds, with their elements."""
    page.evaluate(AXE.read_text())
    answer = page.evaluate("tags => axe.run(document, {runOnly: tags})", _TAGS)
    return [f"{one['id']}: {node['html'][:160]}" for one in answer["violations"] for node in one["nodes"]]
