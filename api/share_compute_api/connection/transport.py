"""HTTP requests to a control plane; HTTP errors are converted to `ShareComputeError`."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from share_compute.errors import (
    NotAuthorized,
    ShareComputeError,
    Unavailable,
    UntrustedCertificate,
    UserError,
    error_of,
)
from share_compute_api.connection.discovery import Target
from share_compute_api.connection.fingerprints import pinned_context

PREFIX = "/api/v1"
_GIVE_KEY = (
    "set SHARE_COMPUTE_API_KEY to a valid key; ask the operator, who makes one with share-compute keys create"
)
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF_WHILE_READING")
"""Reasons of OpenSSL for an answer that is not TLS."""
_RUNS = "check that the server runs (share-compute up)"
Answer = TypeVar("Answer", bound=BaseModel)


class _Connection:
    """Connection to one server: makes requests, and translates failures."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def _options(self, timeout_s: float) -> dict[str, Any]:
        """Return the arguments of the clients of httpx."""
        target = self.target
        if target.api_key is not None and not (target.api_key.isascii() and target.api_key.isprintable()):
            raise NotAuthorized("the API key has characters that no key has", hint=_GIVE_KEY)
        try:
            return {
                "base_url": httpx.URL(target.url + PREFIX),
                "headers": {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
                "timeout": timeout_s,
                "verify": True if target.fingerprint is None else pinned_context(target.fingerprint),
            }
        except (httpx.InvalidURL, ValueError) as failure:
            raise _bad_url(target.url) from failure

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Convert `httpx.TransportError` inside the block to a `ShareComputeError`."""
        try:
            yield
        except (httpx.UnsupportedProtocol, OverflowError) as failure:  # a port above 65535 overflows
            raise _bad_url(self.target.url) from failure
        except httpx.TransportError as failure:
            if (untrusted := _verification_error(failure)) is not None:
                raise UntrustedCertificate(
                    f"the certificate of {self.target.url} is not trusted: {untrusted.verify_message}",
                    hint="give the server's fingerprint, which `share-compute up` shows (SHARE_COMPUTE_FINGERPRINT), "
                    "or name a file with the authority's certificate (SSL_CERT_FILE)",
                ) from failure
            cause, hint = _cause_and_hint(failure, self.target.url)
            raise Unavailable(
                f"no share-compute server answers at {self.target.url}: {cause}", hint=hint
            ) from failure


class Transport(_Connection):
    """An HTTP connection pool to one server.

    Args:
        target: URL, API key and fingerprint of the server.
        timeout_s: longest wait for a connection or for the next bytes of a response, in seconds.
    """

    def __init__(self, target: Target, *, timeout_s: float = 30.0) -> None:
        super().__init__(target)
        self.http = httpx.Client(**self._options(timeout_s))

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return the response if it is successful.

        Raises:
            ShareComputeError: the error in the server's response.
            Unavailable: the server does not answer.
            UntrustedCertificate, WrongFingerprint: the server's certificate or key is not accepted.
        """
        with self.translated():
            response = self.http.request(method, path, **options)
        _require_answer(response)
        return response

    def read(self, kind: type[Answer], method: str, path: str, **options: Any) -> Answer:
        """Send a request and return the response's body as a model of type ``kind``."""
        return kind.model_validate_json(self.request(method, path, **options).content)

    def close(self) -> None:
        """Close all connections."""
        self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncTransport(_Connection):
    """An asynchronous HTTP connection pool to one server; its arguments and errors are those of `Transport`."""

    def __init__(self, target: Target, *, timeout_s: float = 30.0) -> None:
        super().__init__(target)
        self.http = httpx.AsyncClient(**self._options(timeout_s))

    async def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return the response if it is successful; see `Transport.request`."""
        if isinstance(content := options.get("content"), Iterator):
            options["content"] = _asynchronous(content)
        with self.translated():
            response = await self.http.request(method, path, **options)
        _require_answer(response)
        return response

    async def close(self) -> None:
        """Close all connections."""
        await self.http.aclose()


async def _asynchronous(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same pieces asynchronously, because `httpx.AsyncClient` accepts no other iterators."""
    for piece in pieces:
        yield piece


def _verification_error(failure: BaseException | None) -> ssl.SSLCertVerificationError | None:
    return next((one for one in _chain(failure) if isinstance(one, ssl.SSLCertVerificationError)), None)


def _chain(failure: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    while failure is not None:
        yield failure
        failure = failure.__cause__ or failure.__context__


def _cause_and_hint(failure: httpx.TransportError, url: str) -> tuple[str, str]:
    """Return text about why a server does not answer, and a hint."""
    host = httpx.URL(url).host
    told: tuple[str, str] | None = None
    for one in _chain(failure):
        match one:
            case socket.gaierror():
                told = (
                    f"no computer with the name {host} is known",
                    "check the name of the computer in the URL",
                )
            case ConnectionRefusedError():
                told = "nothing listens at this port", f"check the port in the URL, and {_RUNS}"
            case ssl.SSLError(reason=reason) if reason in _NO_TLS:
                told = (
                    "what listens there does not use TLS",
                    "write http:// in the URL in place of https://, or check its port",
                )
            case httpx.TimeoutException():
                told = "it takes too long", f"{_RUNS}, and look for firewalls between"
            case httpx.RemoteProtocolError():
                hint = f"if the server uses TLS, write https:// in the URL; {_RUNS}"
                told = "it closed the connection without an answer", hint
            case OSError(strerror=str(text)) if not isinstance(one, ssl.SSLError):
                told = text[:1].lower() + text[1:], f"{_RUNS}, and look for firewalls between"
        if told is not None:
            return told
    return str(failure) or type(failure).__name__, f"check the URL (http or https), and {_RUNS}"


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the error that a response reports (RFC 9457); do nothing if the response is successful."""
    if response.is_success:
        return
    response.read()
    try:
        problem = response.json()
        code, detail = problem["code"], problem["detail"]
    except (ValueError, KeyError, TypeError):
        raise _no_server(response, f"{response.status_code} {response.reason_phrase}") from None
    if code == NotAuthorized.code and "Authorization" in str(problem.get("hint")):
        problem["hint"] = _GIVE_KEY
    raise error_of(
        code, detail, problem, unknown=ShareComputeError if response.is_server_error else UserError
    )


def _require_answer(response: httpx.Response) -> None:
    """Raise the error that a response reports, or that a web page came in place of an answer of the REST API."""
    raise_for_problem(response)
    if response.headers.get("content-type", "").startswith("text/html"):
        raise _no_server(response, "with a web page")


def _no_server(response: httpx.Response, answered: str) -> ShareComputeError:
    kind: type[ShareComputeError] = Unavailable if response.is_server_error else UserError
    return kind(
        f"{response.url.copy_with(path='/', query=None)} is no share-compute server, or a proxy stands before it: "
        f"it answered {answered}",
        hint="check the URL and its port; the URL of a server has no path",
    )


def require_server_url(url: str, *, has_tls: bool = False) -> None:
    """Raise `UserError` if a text cannot be the URL of a server.

    Args:
        url: the text.
        has_tls: whether the server is known to use TLS; the error then suggests a URL that begins with ``https://``.
    """
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as failure:
        raise _bad_url(url, has_tls=has_tls) from failure
    if found.scheme not in {"http", "https"} or not found.host:
        raise _bad_url(url, has_tls=has_tls)


def _bad_url(url: str, *, has_tls: bool = False) -> UserError:
    try:
        is_without_scheme = "://" not in url and httpx.URL(f"http://{url}").port is not None
    except (httpx.InvalidURL, ValueError):
        is_without_scheme = False
    # A server without TLS usually listens on loopback only.
    is_plain = not has_tls and url.partition(":")[0] in {"localhost", "127.0.0.1"}
    meant = f"http://{url}" if is_plain else f"https://{url}"
    more = f"; did you mean {meant!r}?" if is_without_scheme else ""
    return UserError(f"{url!r} is not the URL of a server{more}", hint="write it like https://192.0.2.1:8700")
