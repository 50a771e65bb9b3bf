"""Serving of the built files: pages, assets, headers, and the answer if nothing was built."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from share_compute_api.app import dashboard


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A folder as Vite leaves it."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "index-Ab12.js").write_text("console.log(1)")
    (tmp_path / "assets" / "index-Ab12.js.br").write_bytes(b"compressed by brotli")
    (tmp_path / "assets" / "index-Ab12.js.gz").write_bytes(gzip.compress(b"console.log(1)"))
    (tmp_path / "assets" / "plain-Cd34.js").write_text("console.log(2)")
    (tmp_path / "icon.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    (tmp_path / "index.html").write_text(
        '<meta property="csp-nonce" nonce="__CSP_NONCE__"><script nonce="__CSP_NONCE__"></script>'
    )
    return tmp_path


def client_of(folder: Path) -> httpx.AsyncClient:
    app = FastAPI()

    @app.get("/api/v1/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    dashboard.mount(app, folder)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://cluster")


async def get(folder: Path, path: str) -> httpx.Response:
    async with client_of(folder) as client:
        return await client.get(path)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/", "/index.html", "/jobs", "/jobs/job-ab12?state=failed"])
async def test_client_routes_get_the_page(built: Path, path: str) -> None:
    answer = await get(built, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.anyio
async def test_the_page_runs_only_what_bears_its_nonce(built: Path) -> None:
    first, second = await get(built, "/"), await get(built, "/")
    nonces = set(re.findall('nonce="([^"]+)"', first.text))
    assert len(nonces) == 1
    nonce = nonces.pop()
    assert "__CSP_NONCE__" not in first.text
    assert nonce not in second.text
    policy = first.headers["content-security-policy"]
    assert f"script-src 'self' 'nonce-{nonce}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.anyio
async def test_hashed_assets_are_kept_for_good(built: Path) -> None:
    answer = await get(built, "/assets/index-Ab12.js")
    assert answer.text == "console.log(1)"
    assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "Accept-Encoding")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "immutable" not in (await get(built, "/icon.svg")).headers.get("cache-control", "")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("accepted", "coding", "content"),
    [
        ("identity", None, b"console.log(1)"),
        ("", None, b"console.log(1)"),
        ("gzip;q=0, br; q=0.0", None, b"console.log(1)"),
        ("x-gzip", None, b"console.log(1)"),
        ("GZIP", "gzip", b"console.log(1)"),
        ("deflate, gzip;q=0.5", "gzip", b"console.log(1)"),
        ("gzip, deflate, br", "br", b"compressed by brotli"),
    ],
)
async def test_the_smallest_accepted_copy_of_an_asset_is_sent(
    built: Path, accepted: str, coding: str | None, content: bytes
) -> None:
    async with client_of(built) as client:
        answer = await client.get("/assets/index-Ab12.js", headers={"Accept-Encoding": accepted})
    assert answer.content == content
    assert (answer.headers.get("content-encoding"), answer.headers["vary"]) == (coding, "Accept-Encoding")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.headers["content-length"] == str(
        len(gzip.compress(content) if coding == "gzip" else content)
    )


@pytest.mark.anyio
async def test_an_asset_without_copies_is_sent_as_it_is(built: Path) -> None:
    answer = await get(built, "/assets/plain-Cd34.js")
    assert (answer.text, "content-encoding" in answer.headers) == ("console.log(2)", False)
    assert answer.headers["vary"] == "Accept-Encoding"
    assert "immutable" in answer.headers["cache-control"]


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/assets/gone-Zz99.js", "/api/v1/nothing", "/api/v2/jobs"])
async def test_unknown_assets_and_api_paths_are_not_the_page(built: Path, path: str) -> None:
    assert (await get(built, path)).status_code == 404


@pytest.mark.anyio
async def test_a_wrong_method_is_no_page(built: Path) -> None:
    async with client_of(built) as client:
        assert (await client.post("/api/v1/nothing")).status_code == 404
        assert (await client.post("/jobs")).status_code == 405


@pytest.mark.anyio
async def test_the_api_comes_first(built: Path) -> None:
    assert (await get(built, "/api/v1/health")).json() == {"status": "ok"}


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/%2e%2e/secret.txt", "/assets/%2e%2e/%2e%2e/secret.txt", "/..%2fsecret"])
async def test_files_outside_the_folder_stay_outside(built: Path, path: str) -> None:
    folder = built / "inner"
    folder.mkdir()
    (folder / "index.html").write_text("page")
    (built / "secret.txt").write_text("secret")
    assert "secret" not in (await get(folder, path)).text


@pytest.mark.anyio
async def test_without_a_build_the_page_says_how_to_make_one(tmp_path: Path) -> None:
    answer = await get(tmp_path / "nothing", "/")
    assert answer.status_code == 503
    assert "make dashboard" in answer.text
    assert (await get(tmp_path / "nothing", "/api/v1/health")).status_code == 200
    assert (await get(tmp_path / "nothing", "/api/v1/nothing")).status_code == 404
