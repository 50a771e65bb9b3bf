"""The reverse proxies of docs/deployment.md, as they are written there, in front of a real server."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from tests.api.conftest import DEADLINE_S, Plane, wait_until
from tests.api.speaking import Speaker, make_tokenizer
from tests.held_ports import HeldPort
from tests.programs import require
from tests.security.certificates import write_certificate
from tests.security.planes import open_plane

from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

PAGE = Path(__file__).parents[2] / "docs" / "deployment.md"
ANSWER = "the quick brown fox jumps over the lazy dog"


def snippet(language: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


def nginx(folder: Path, port: int, behind: int) -> list[str]:
    program = require("nginx", "/usr/sbin/nginx")
    site = snippet("nginx").replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    site = site.replace("127.0.0.1:8700", f"127.0.0.1:{behind}").replace("/etc/ssl", str(folder))
    bodies = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{bodies}{site}\n}}\n",
        encoding="utf-8",
    )
    return [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, port: int, behind: int) -> list[str]:
    program = require("caddy")
    own = f"https://127.0.0.1:{port} {{\n    tls {folder}/share.pem {folder}/share.key"
    site = snippet("caddyfile").replace("share.example.org {", own)
    site = site.replace("127.0.0.1:8700", f"127.0.0.1:{behind}")
    options = "{\n    admin off\n    auto_https disable_redirects\n}\n"
    (folder / "Caddyfile").write_text(options + site, encoding="utf-8")
    return [program, "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@contextmanager
def proxied(folder: Path, plane: Plane, make: object) -> Iterator[httpx.Client]:
    """Run a proxy in front of the server inside the block; gives a client of the proxy."""
    write_certificate(folder / "share.pem", folder / "share.key", ["127.0.0.1"])
    held = HeldPort()  # until the proxy has ended
    port = held.number
    command = make(folder, port, plane.server.port)  # type: ignore[operator]
    context = ssl.create_default_context(cafile=str(folder / "share.pem"))
    environment = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "PATH": "/usr/bin:/bin"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=DEADLINE_S) as client:

            def answers() -> bool:
                assert process.poll() is None, (folder / "output").read_text()
                try:
                    return client.get("/api/v1/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(answers)
            yield client
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("make", [nginx, caddy])
def test_the_documented_proxy_passes_streams_uploads_and_addresses(tmp_path: Path, make: object) -> None:
    with (
        open_plane(tmp_path, proxy_addresses="127.0.0.1") as plane,
        proxied(tmp_path, plane, make) as client,
    ):
        key = {"Authorization": f"Bearer {plane.api_key}"}
        with client.stream("GET", "/api/v1/events", headers=key) as stream:
            lines = stream.iter_lines()
            next(lines)  # before anything happened
            plane.store.events.record("alerts", {})
            assert any(line == "event: alerts" for line in lines)

        folder = make_tokenizer(tmp_path / "tokenizer")
        tokenizer = ServedTokenizer(folder)
        ids = (*tokenizer.encode(ANSWER, 100), *tokenizer.vocabulary.end_ids)
        speaker = Speaker("model", folder, lambda _: ids)
        speaker.pause_after = 3
        plane.app.state.context.engines.add(speaker)
        with OpenAI(
            base_url=f"{client.base_url}/v1".replace("//v1", "/v1"),
            api_key=plane.api_key,
            http_client=client,
            max_retries=0,
        ) as openai:
            hello = [{"role": "user", "content": "Hello"}]
            stream = openai.chat.completions.create(model="model", messages=hello, stream=True)
            words = [chunk.choices[0].delta.content or "" for _, chunk in zip(range(2), stream, strict=False)]
            assert not speaker.go_on.is_set()  # these arrived while the model still generated
            speaker.go_on.set()
            words += [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
            assert "".join(words) == ANSWER

        with httpx.Client(
            base_url=client.base_url, verify=ssl.create_default_context(cafile=str(tmp_path / "share.pem"))
        ) as page:
            site = {"Sec-Fetch-Site": "same-origin", "X-Forwarded-For": "192.0.2.66"}
            signed_in = page.post("/api/v1/session", json={"key": plane.api_key}, headers=site)
            assert "Secure" in signed_in.headers["set-cookie"]
            made = page.post("/api/v1/uploads", json={"name": "rows", "kind": "data"}, headers=key).json()[
                "id"
            ]
            rows = b'{"text": "abcdefgh"}\n' * 200_000  # 4 MB
            put = page.put(f"/api/v1/uploads/{made}/files/rows.jsonl", content=rows, headers=key)
            assert put.is_success, put.text
