"""A stand-in of the Hugging Face Hub on loopback: the requests that huggingface_hub sends for models, with git LFS."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"
OWNER = "ada"


@dataclass
class Repository:
    """A repository with one commit."""

    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    branches: tuple[str, ...] = ("main",)

    @property
    def commit(self) -> str:
        listing = "".join(
            f"{name}{hashlib.sha1(data).hexdigest()}" for name, data in sorted(self.files.items())
        )
        return hashlib.sha1(listing.encode()).hexdigest()


@dataclass
class Hub:
    """The repositories, and the requests that were received."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> content of files that git LFS keeps."""
    fetched: list[str] = field(default_factory=list)
    """Files that were downloaded, in order."""
    tokens: set[str] = field(default_factory=set)
    """Values of the Authorization header."""
    asked: list[str] = field(default_factory=list)
    """Models that questions were about, in order."""
    damaged: set[str] = field(default_factory=set)
    """Files that arrive with other content than announced."""
    opened: threading.Event = field(default_factory=threading.Event)
    """Downloads of weights wait until this is set."""
    answers: threading.Event = field(default_factory=threading.Event)
    """Questions about models wait until this is set."""
    pieces: threading.Semaphore | None = None
    """Permits to send 1 MiB of a file; its first MiB needs none. None: files are sent without a limit."""

    def __post_init__(self) -> None:
        self.opened.set()
        self.answers.set()


class _Requests(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _send(self, status: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self._write(data)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, {"error": message}, X_Error_Code=code, X_Error_Message=message)

    @property
    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, revision: str) -> Repository | None:
        """Return a repository, or answer why there is none."""
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not self._is_known):
            self._refuse(404, "RepoNotFound", "Repository not found")
            return None
        if revision not in (*found.branches, found.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return found

    def do_GET(self) -> None:
        self.hub.tokens.add(self.headers.get("Authorization") or "")
        path = unquote(urlsplit(self.path).path)
        if path == "/api/whoami-v2":
            self._send(200, {"type": "user", "name": OWNER, "fullname": OWNER, "orgs": []})
            return
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self.hub.asked.append(name)
            self.hub.answers.wait(600)
            found = self._repository(name, revision or "main")
            if found is not None:
                self._send(200, self._info(name, found))
            return
        name, _, rest = path[1:].partition("/resolve/")
        revision, _, file = rest.partition("/")
        found = self._repository(name, revision)
        if found is None:
            return
        if found.gated and not self._is_known:
            self._refuse(401, "GatedRepo", f"Access to model {name} is restricted")
        elif file not in found.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            if file.endswith(".safetensors"):
                self.hub.opened.wait(600)
            self.hub.fetched.append(file)
            data = found.files[file]
            with suppress(ConnectionError):
                self._send(200, b"?" * len(data) if file in self.hub.damaged else data)

    def _write(self, data: bytes) -> None:
        for start in range(0, len(data), 1 << 20):
            if start and (pieces := self.hub.pieces) is not None:
                pieces.acquire()
            self.wfile.write(data[start : start + (1 << 20)])

    do_HEAD = do_GET  # noqa: N815 - the name is that of the base class

    def _info(self, name: str, found: Repository) -> dict[str, Any]:
        siblings = []
        for file, data in sorted(found.files.items()):
            entry: dict[str, Any] = {
                "rfilename": file,
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
            }
            if file.endswith((".safetensors", ".bin")):
                entry["lfs"] = {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 134,
                }
            siblings.append(entry)
        gated = "manual" if found.gated else False
        return {
            "id": name,
            "sha": found.commit,
            "private": found.private,
            "gated": gated,
            "siblings": siblings,
        }

    def do_PUT(self) -> None:
        content = self._body()
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._send(200)

    def do_POST(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        if path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif not self._is_known:
            self._send(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/objects/batch"):
            self._send(200, self._batch(json.loads(body)))
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = ({**file, "uploadMode": _mode(file["path"]), "shouldIgnore": False} for file in files)
            self._send(
                200, {"files": [{name: one[name] for name in one if name != "sample"} for one in modes]}
            )
        else:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        status = 409 if name in self.hub.repositories else 200
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repositories.setdefault(name, Repository(private=private))
        self._send(status, {"url": f"{self.hub.url}/{name}", "name": name, "id": "1"})

    def _batch(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {
            "transfer": "basic",
            "objects": [
                {**one, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}", "header": {}}}}
                for one in wanted["objects"]
            ],
        }

    def _commit(self, name: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.objects[value["oid"]]
        commit = repository.commit
        self._send(
            200, {"success": True, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit}
        )


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Run a Hub on a free port of loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Requests", (_Requests,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.opened.set()
        hub.answers.set()
        if hub.pieces is not None:
            hub.pieces.release(1000)
        server.shutdown()
        server.server_close()
        thread.join()
