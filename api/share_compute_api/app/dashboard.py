"""Serves the built dashboard at ``/``: hashed assets, ``index.html`` for client routes, security headers.

The files are built from ``web/`` when the package is built or installed (``web/build_hook.py``) and are shipped
inside the wheel. Without the files the server still works, and ``/`` shows how to build them.
"""

from __future__ import annotations

import base64
import re
import secrets
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

STATIC_FOLDER: Final = Path(__file__).parents[1] / "static"

_NONCE_PLACEHOLDER: Final = "__CSP_NONCE__"
"""Placeholder that Vite writes into the page (``html.cspNonce`` in vite.config.ts).

Each response replaces the placeholder with a new CSP nonce.
"""

_APIS: Final = ("/api/", "/v1/")
_ASSETS: Final = "assets/"
_CODINGS: Final = {"br": ".br", "gzip": ".gz"}
"""Content coding -> suffix of the compressed copies that ``vite build`` writes, smallest copy first."""
_REFUSED: Final = re.compile(r"\s*q\s*=\s*0(\.0*)?\s*")

_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}

_NOT_BUILT: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width"><title>share-compute</title></head>
<body>
<main>
<h1>The dashboard is not built</h1>
<p>The server works: the REST API is at <code>/api/v1</code>,
and <code>share-compute --help</code> lists every command.</p>
<p>To build the dashboard, run this in the repository (node is fetched where it is missing) and reload:</p>
<pre>make dashboard</pre>
</main>
</body>
</html>
"""


def mount(app: FastAPI, folder: Path = STATIC_FOLDER) -> None:
    """Serve the dashboard at ``/``, after every route that the app already has.

    Args:
        app: the control plane; the app's own routes must be added first, since the dashboard answers every other path.
        folder: folder of the built files; read at each request, so that a new build is served without a restart.
    """
    app.router.routes.append(
        _PageRoute(
            "/{path:path}",
            _Dashboard(folder),
            methods=["GET", "HEAD"],
            include_in_schema=False,
        )
    )


class _PageRoute(Route):
    """Route for every path outside the APIs; an unknown path inside an API returns 404."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and scope["path"].startswith(_APIS):
            return Match.NONE, {}
        return super().matches(scope)


class _Dashboard:
    """ASGI application that serves the built files."""

    def __init__(self, folder: Path) -> None:
        self._index = folder / "index.html"
        self._files = StaticFiles(directory=folder, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a built file, or ``index.html`` if there is no such file; send 404 for an unknown file in ``assets/``.

        If the dashboard is not built, send 503 at ``/`` and 404 elsewhere.
        """
        path: str = scope["path_params"]["path"]
        response = await self._answer(path, scope)
        response.headers.update(_HEADERS)
        await response(scope, receive, send)

    async def _answer(self, path: str, scope: Scope) -> Response:
        if not self._index.is_file():
            return HTMLResponse(
                _NOT_BUILT, status_code=503 if path == "" else 404, headers=_page_headers("'none'")
            )
        if path in ("", "index.html"):
            return self._page()
        try:
            if path.startswith(_ASSETS):
                return await self._asset(path, scope)
            return await self._files.get_response(path, scope)
        except HTTPException as failure:
            if failure.status_code != 404 or path.startswith(_ASSETS):
                raise
            return self._page()

    async def _asset(self, path: str, scope: Scope) -> Response:
        """Return the smallest copy of an asset that the client accepts."""
        accepted = Headers(scope=scope).get("accept-encoding", "")
        response = await self._files.get_response(path, scope)
        for coding, ending in _CODINGS.items():
            if not _accepts(accepted, coding):
                continue
            try:
                response = await self._files.get_response(path + ending, scope)
            except HTTPException:  # there is no copy in this coding
                continue
            response.headers["Content-Encoding"] = coding
            break
        response.headers["Vary"] = "Accept-Encoding"
        # The name contains a hash of the content, so a cached copy never becomes outdated.
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response

    def _page(self) -> Response:
        nonce = base64.b64encode(secrets.token_bytes(18)).decode()
        html = self._index.read_text(encoding="utf-8").replace(_NONCE_PLACEHOLDER, nonce)
        return HTMLResponse(html, headers=_page_headers(f"'self' 'nonce-{nonce}'"))


def _accepts(header: str, coding: str) -> bool:
    """Return whether an Accept-Encoding header accepts a content coding; a weight of 0 rejects it."""
    parts = (part.partition(";") for part in header.lower().split(","))
    return any(name.strip() == coding and not _REFUSED.fullmatch(weight) for name, _, weight in parts)


def _page_headers(sources: str) -> dict[str, str]:
    """Return the security and cache headers of a page that may load scripts and styles only from ``sources``."""
    policy = {
        "default-src": "'none'",
        "script-src": sources,
        "style-src": sources,
        "img-src": "'self' data:",
        "font-src": "'self'",
        "connect-src": "'self'",
        "manifest-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
    }
