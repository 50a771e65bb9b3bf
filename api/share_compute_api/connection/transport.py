"""HTTP requests to a control plane; HTTP errors are converted to `ShareComputeError`."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel

from share_compute.errors import (
    ShareComputeError,
    Unavailable,
    UntrustedCertificate,
    UserError,
    error_of,
)
from share_compute_api.connection.discovery import Target
from share_compute_api.connection.fingerprints import pinned_context

PREFIX = "/api/v1"
Answer = TypeVar("Answer", bound=BaseModel)


class Transport:
    """An HTTP connection pool to one server.

    Args:
        target: URL, API key and fingerprint of the server.
        timeout_s: longest wait for a connection or for the next bytes of a response, in seconds.
    """

    def __init__(self, target: Target, *, timeout_s: float = 30.0) -> None:
        self.target = target
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        try:
            self.http = httpx.Client(
                base_url=target.url + PREFIX,
                headers=headers,
                timeout=timeout_s,
                verify=True if target.fingerprint is None else pinned_context(target.fingerprint),
            )
        except (httpx.InvalidURL, ValueError) as failure:
            raise _bad_url(target.url) from failure

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request and return the response if it is successful.

        Raises:
            ShareComputeError: the error in the server's response.
            Unavailable: the server does not answer.
            UntrustedCertificate, WrongFingerprint: the server's certificate or key is not accepted.
        """
        with self.translated():
            response = self.http.request(method, path, **options)
        raise_for_problem(response)
        return response

    def read(self, kind: type[Answer], method: str, path: str, **options: Any) -> Answer:
        """Send a request and return the response's body as a model of type ``kind``."""
        return kind.model_validate_json(self.request(method, path, **options).content)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Convert `httpx.TransportError` inside the block to a `ShareComputeError`."""
        try:
            yield
        except httpx.UnsupportedProtocol as failure:
            raise _bad_url(self.target.url) from failure
        except httpx.TransportError as failure:
            if (untrusted := _verification_error(failure)) is not None:
                raise UntrustedCertificate(
                    f"the certificate of {self.target.url} is not trusted: {untrusted.verify_message}",
                    hint="give the server's fingerprint, which `share-compute up` shows (SHARE_COMPUTE_FINGERPRINT), "
                    "or name a file with the authority's certificate (SSL_CERT_FILE)",
                ) from failure
            raise Unavailable(
                f"no share-compute server answers at {self.target.url}: {failure or type(failure).__name__}",
                hint="check the URL (http or https), that the server runs (`share-compute up`), and firewalls between",
            ) from failure

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


def _verification_error(failure: BaseException | None) -> ssl.SSLCertVerificationError | None:
    while failure is not None and not isinstance(failure, ssl.SSLCertVerificationError):
        failure = failure.__cause__ or failure.__context__
    return failure


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the error that a response reports (RFC 9457); do nothing if the response is successful."""
    if response.is_success:
        return
    response.read()
    try:
        problem = response.json()
        code, detail = problem["code"], problem["detail"]
    except (ValueError, KeyError, TypeError):
        kind: type[ShareComputeError] = Unavailable if response.is_server_error else UserError
        raise kind(
            f"{response.url} answered {response.status_code} {response.reason_phrase}",
            hint="check that the URL is that of a share-compute server",
        ) from None
    raise error_of(
        code, detail, problem, unknown=ShareComputeError if response.is_server_error else UserError
    )


def _bad_url(url: str) -> UserError:
    return UserError(f"{url!r} is not a URL of a server", hint="write it like http://192.0.2.1:8700")
