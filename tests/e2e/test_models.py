"""The page of models: the catalogue, its filters, a plan on request, and deployment in one click."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.e2e.accessibility import LOCALES, appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints, open_cluster
from tests.e2e.scenes import join, measure
from tests.e2e.talking import TalkingServer, make_model

pytestmark = pytest.mark.browser
CATALOGUE = """
models:
  - name: Far away
    model: {hub: org/far}
    description: Answers in English.
    licence: apache-2.0
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "data").mkdir()
    make_model(tmp_path / "poet")
    make_model(tmp_path / "base", with_template=False)
    with open_cluster(tmp_path / "data", TalkingServer) as cluster:
        yield cluster


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=name, exact=True)


def test_a_model_is_found_planned_and_deployed_in_one_click(page: Page, cluster: Cluster) -> None:
    (cluster.folder / "catalogue.yaml").write_text(CATALOGUE)
    measure(cluster.store, join(cluster.store, "ash"), 51e9)
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.get_by_role("article")).to_have_count(3)
    expect(card(page, "Far away")).to_contain_text("It is fetched from the Hub")
    poet = card(page, "poet")
    expect(poet).to_contain_text("LlamaForCausalLM")
    expect(poet).to_contain_text("chat")
    expect(card(page, "base")).to_contain_text("no chat template")

    page.get_by_label("Search models").fill("poet")
    expect(page.get_by_role("article")).to_have_count(1)
    page.get_by_label("Search models").fill("")
    sources = page.get_by_role("navigation", name="Models by source")
    sources.get_by_role("link", name="recommended").click()
    expect(page.get_by_role("article")).to_have_count(1)
    sources.get_by_role("link", name="all").click()

    poet.get_by_role("button", name="Does it fit here? poet").click()
    expect(poet.get_by_role("status")).to_contain_text(
        re.compile(r"Fits here on 1 machine, about .*tokens/s"), timeout=120_000
    )
    poet.get_by_role("link", name="Options for poet").click()
    expect(page.get_by_label(re.compile("^Name"))).to_have_value("poet")
    poet.get_by_role("button", name="Deploy poet").click()
    expect(page.get_by_role("heading", name="poet", level=1)).to_be_visible()
    page.get_by_role("link", name="Models", exact=True).click()
    expect(page.get_by_role("row", name=re.compile("poet"))).to_be_visible()


def test_a_cluster_without_models_says_how_to_get_one(
    browser: Browser, tmp_path: Path, complaints: Complaints
) -> None:
    (tmp_path / "empty" / "data").mkdir(parents=True)
    with open_cluster(tmp_path / "empty" / "data") as cluster:
        context = browser.new_context()
        page = context.new_page()
        complaints.listen(page)
        page.goto(f"{cluster.url}/#key={cluster.key}")
        page.get_by_role("link", name="Models", exact=True).click()
        expect(page.get_by_role("heading", name="No model is here yet")).to_be_visible()
        expect(page.get_by_label("Command that sends a model")).to_have_text("share-compute upload FOLDER")
        context.close()


@appearances("phone", ("en", "zh"))
def test_the_page_is_accessible_and_fits(
    cluster: Cluster,
    browser: Browser,
    tmp_path: Path,
    language: str,
    scheme: Any,
    width: int,
    complaints: Complaints,
) -> None:
    (cluster.folder / "catalogue.yaml").write_text(CATALOGUE + "  - {name: Wrong, model: {path: /etc}}\n")
    shots = tmp_path / "shots"
    with checked_pages(
        browser, shots, complaints, scheme=scheme, width=width, locale=LOCALES[language]
    ) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/#key={cluster.key}")
        page.get_by_role("heading", level=1).wait_for()
        page.goto(f"{cluster.url}/models")
        expect(card(page, "poet")).to_contain_text("LlamaForCausalLM")
        seen.check("models")
