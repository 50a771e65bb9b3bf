"""Errors that share-compute raises on purpose.

ShareComputeError
├── UserError
│   ├── ClockSkew
│   ├── TooLong
│   ├── TooLarge
│   ├── NotFound
│   │   └── Gone
│   ├── Conflict
│   │   ├── InviteUsed
│   │   └── VersionMismatch
│   └── NotAuthorized
│       ├── InviteUnknown
│       ├── InviteExpired
│       ├── InviteRevoked
│       ├── MissingScope
│       ├── NotOwner
│       ├── OtherSite
│       ├── InsecureTransport
│       ├── WrongFingerprint
│       └── UntrustedCertificate
├── PlanInfeasible
│   └── OutOfMemory
├── NoCopy
├── ContributorLost
├── StaleEpoch
├── VerificationFailed
│   └── WrongTensor
└── Unavailable
    ├── Busy
    │   └── TooManyAttempts
    ├── Fenced
    ├── FetchUnderWay
    ├── ShardStoreLost
    ├── LinkLost
    └── CompilerFailed
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class ShareComputeError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: one sentence about what happened.
        hint: an action that the reader can take.
        job: id of the job concerned.
        step: training step at which it happened.
        machine: name of the contributor concerned.
        details: further facts, JSON-serializable, e.g. ``missing_bytes``.
    """

    code: ClassVar[str] = "internal"
    """Stable machine-readable name of the class."""
    status: ClassVar[int] = 500
    """HTTP status of the response."""
    exit_code: ClassVar[int] = 1
    """Exit status of a command that fails with this error."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        job: str | None = None,
        step: int | None = None,
        machine: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.job = job
        self.step = step
        self.machine = machine
        self.details = details or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return (function, arguments) from which pickle rebuilds the error with all its fields."""
        return _rebuild, (type(self), self.message, self.facts())

    def facts(self) -> dict[str, Any]:
        """Return the fields that are set, by name, without the message."""
        known = {
            "hint": self.hint,
            "job": self.job,
            "step": self.step,
            "machine": self.machine,
            "details": self.details,
        }
        return {name: value for name, value in known.items() if value not in (None, {})}


def _rebuild(kind: type[ShareComputeError], message: str, facts: dict[str, Any]) -> ShareComputeError:
    return kind(message, **facts)


class UserError(ShareComputeError):
    """The request cannot be fulfilled as it is; it must be corrected."""

    code = "invalid-request"
    status = 422
    exit_code = 2


class NotFound(UserError):
    """The named object does not exist, or not any more."""

    code = "not-found"
    status = 404
    exit_code = 3


class Gone(NotFound):
    """The named object existed, and does not exist any more."""

    code = "gone"
    status = 410


class Conflict(UserError):
    """The named object exists, but its state forbids the request."""

    code = "conflict"
    status = 409
    exit_code = 4


class NotAuthorized(UserError):
    """The caller is not allowed to make the request."""

    code = "not-authorized"
    status = 401
    exit_code = 5


class ClockSkew(UserError):
    """The clocks of two machines differ too much."""

    code = "clock-skew"


class TooLong(UserError):
    """The text is too long for the model or for its machines."""

    code = "too-long"
    status = 400


class TooLarge(UserError):
    """An upload, a request body or a call is larger than allowed."""

    code = "too-large"
    status = 413


class VersionMismatch(Conflict):
    """Two machines run versions that do not work together."""

    code = "version-mismatch"


class InviteUnknown(NotAuthorized):
    """No invite has this code."""

    code = "invite-unknown"


class InviteUsed(Conflict):
    """The invite has no use left."""

    code = "invite-used"
    exit_code = 5


class InviteExpired(NotAuthorized):
    """The invite has expired."""

    code = "invite-expired"
    status = 410


class InviteRevoked(NotAuthorized):
    """The invite was revoked."""

    code = "invite-revoked"
    status = 410


class MissingScope(NotAuthorized):
    """The key is valid, but lacks a required scope."""

    code = "missing-scope"
    status = 403


class NotOwner(NotAuthorized):
    """The object belongs to another key."""

    code = "not-owner"
    status = 403


class OtherSite(NotAuthorized):
    """A request with a session cookie may come from a page of another site (CSRF)."""

    code = "other-site"
    status = 403


class InsecureTransport(NotAuthorized):
    """A secret would travel over plain HTTP between machines."""

    code = "insecure-transport"
    status = 403


class WrongFingerprint(NotAuthorized):
    """The server's key does not have the expected fingerprint."""

    code = "wrong-fingerprint"


class UntrustedCertificate(NotAuthorized):
    """The server's certificate could not be verified."""

    code = "untrusted-certificate"


class PlanInfeasible(ShareComputeError):
    """There is no plan for the job or deployment.

    ``details`` has ``missing_bytes`` if the planner computed it.
    """

    code = "plan-infeasible"
    status = 422
    exit_code = 6


class OutOfMemory(PlanInfeasible):
    """A member ran out of memory; ``details`` has ``taken_bytes``."""

    code = "out-of-memory"

    @property
    def taken_bytes(self) -> int:
        """Return the bytes that the process had taken.

        This is its peak of reserved GPU memory if the GPU ran out, otherwise its resident memory.
        """
        return int(self.details["taken_bytes"])


class NoCopy(ShareComputeError):
    """A machine cannot keep a backup of another machine's shard."""

    code = "no-copy"

    @property
    def lacks_space(self) -> bool:
        """Return whether the machine lacks memory or disk space for the backup."""
        return bool(self.details.get("lacks_space"))

    @property
    def owner(self) -> str:
        """Return the id of the primary, the contributor whose shard was to be backed up; empty if unknown."""
        return str(self.details.get("owner", ""))

    @property
    def epoch(self) -> int:
        """Return the epoch in which the backup failed; 0 if unknown."""
        return int(self.details.get("epoch", 0))


class ContributorLost(ShareComputeError):
    """A machine failed or became unavailable; the operation can be retried."""

    code = "contributor-lost"
    status = 503
    exit_code = 7


class StaleEpoch(ShareComputeError):
    """A message or an operation is superseded, for example because it belongs to an earlier epoch."""

    code = "stale-epoch"
    status = 409


class VerificationFailed(ShareComputeError):
    """A result or stored data is missing, incomplete, damaged or not what was requested."""

    code = "verification-failed"
    status = 500


class WrongTensor(VerificationFailed):
    """A machine sent a tensor that does not fit the model."""

    code = "wrong-tensor"

    @classmethod
    def of(cls, machine: str, worker: str, what: str, step: int | None = None) -> Self:
        """Return the error for a wrong tensor that a machine sent.

        Args:
            machine: name of the machine.
            worker: contributor id of the machine.
            what: the defect of the tensor, for the message.
            step: step of the job, if it is known.
        """
        return cls(
            f"{machine} sent a wrong tensor: {what}",
            machine=machine,
            step=step,
            hint=f"check the memory and the software of {machine}; the job continues without it",
            details={"worker": worker, "what": what},
        )

    @property
    def worker(self) -> str:
        """Return the id of the contributor that sent the tensor; empty if unknown."""
        return str(self.details.get("worker", ""))

    @property
    def what(self) -> str:
        """Return a description of the tensor's defect; empty if unknown."""
        return str(self.details.get("what", ""))

    @property
    def accuser(self) -> str:
        """Return the id of the contributor that reported the tensor; empty if unknown."""
        return str(self.details.get("accuser", ""))


class Unavailable(ShareComputeError):
    """A needed service does not answer; the caller may try again."""

    code = "unavailable"
    status = 503
    exit_code = 8


class FetchUnderWay(Unavailable):
    """The server is still fetching a model of the request; ``details`` has ``retry_after_s``."""

    code = "fetch-under-way"


class Busy(Unavailable):
    """The server has too many requests; ``details`` has ``retry_after_s``."""

    code = "busy"
    status = 429

    @property
    def retry_after_s(self) -> int:
        """Return the number of seconds to wait before a retry."""
        return int(self.details["retry_after_s"])


class Fenced(Unavailable):
    """This server may not write to the database, for example because another server took it over."""

    code = "fenced"
    exit_code = 4


class TooManyAttempts(Busy):
    """An address sent too many wrong keys or invites."""

    code = "too-many-attempts"


class ShardStoreLost(Unavailable):
    """The actor that serves samples and weights died."""

    code = "shard-store-lost"


class LinkLost(Unavailable):
    """Members did not reconnect after the coordinator's host had lost its network."""

    code = "link-lost"


class CompilerFailed(Unavailable):
    """A machine cannot compile a model's layers; the job can continue without compiled code."""

    code = "compiler-failed"


def as_ours(failure: Exception) -> ShareComputeError:
    """Return a `ShareComputeError` unchanged; wrap any other exception in a `ShareComputeError`."""
    if isinstance(failure, ShareComputeError):
        return failure
    return ShareComputeError(
        f"{type(failure).__name__}: {failure}",
        hint="look at the job's log; if the cause is not yours, report it",
    )


def first_line(failure: BaseException) -> str:
    """Return the first line of an exception's message, which torch and Ray may end with a stack; else its class."""
    return next(iter(str(failure).splitlines()), "") or type(failure).__name__


_MEMORY_TEXTS = (
    "DefaultCPUAllocator", "allocate memory", "bad_alloc", "cannot map zero-fill", "failed to map segment",
    "launch worker thread", "out of memory", "start new thread",
)  # fmt: skip
"""Parts of messages of the system, C++, torch, pyarrow, Pillow and Python if main memory is lacking."""


def is_lack_of_memory(failure: BaseException | None) -> bool:
    """Return whether lack of main memory caused an error.

    Python, the system and libraries raise different errors. C code that ignores a failed allocation makes Python raise
    SystemError, and a library that finds no memory for itself makes it raise ImportError.
    """
    while failure is not None:
        is_of_system = isinstance(failure, OSError) and failure.errno == errno.ENOMEM
        if is_of_system or isinstance(failure, MemoryError | SystemError):
            return True
        has_users_words = isinstance(failure, ShareComputeError | ValueError)
        if not has_users_words and any(text in str(failure) for text in _MEMORY_TEXTS):
            return True
        failure = failure.__cause__ or failure.__context__
    return False


def error_of(
    code: str,
    detail: str,
    facts: Mapping[str, Any],
    *,
    unknown: type[ShareComputeError] = ShareComputeError,
) -> ShareComputeError:
    """Rebuild an error that another process raised.

    Args:
        code: stable name of the error's class, `ShareComputeError.code`.
        detail: message of the error.
        facts: further fields of the error; unknown keys are ignored.
        unknown: class to use if no error class has this code.
    """
    known = {name: facts.get(name) for name in ("hint", "job", "step", "machine", "details")}
    return _kinds().get(code, unknown)(detail, **known)


def _kinds() -> dict[str, type[ShareComputeError]]:
    kinds: dict[str, type[ShareComputeError]] = {}
    todo: list[type[ShareComputeError]] = [ShareComputeError]
    while todo:
        kind = todo.pop()
        kinds[kind.code] = kind
        todo += kind.__subclasses__()
    return kinds
