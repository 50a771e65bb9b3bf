"""Errors that share-compute raises on purpose.

    ShareComputeError
    ├── UserError              correct the request: it cannot be fulfilled as it is
    │   ├── ClockSkew          the clocks of two machines differ too much
    │   ├── TooLong            the text is longer than the model's window or the KV capacity of its machines
    │   ├── TooLarge           the upload or body takes more space than the server allows for it
    │   ├── NotFound           the named object does not exist, or not any more
    │   ├── Conflict           the named object exists, but its state forbids the request
    │   │   ├── InviteUsed     the invite has no use left
    │   │   └── VersionMismatch   two machines run versions that do not work together
    │   └── NotAuthorized      the key, invite or code does not allow the request
    │       ├── InviteUnknown  no invite has this code
    │       ├── InviteExpired  the invite has expired
    │       ├── InviteRevoked  the invite was revoked
    │       ├── MissingScope   the key is valid, but lacks a scope, which the error names
    │       ├── NotOwner       the object belongs to another key
    │       ├── OtherSite      a page of another site made a browser send the request with its session cookie
    │       ├── InsecureTransport   a secret would travel over plain HTTP between machines
    │       ├── WrongFingerprint    the server's key does not have the expected fingerprint
    │       └── UntrustedCertificate   this machine does not trust the server's certificate
    ├── PlanInfeasible         there is no plan for a job or deployment; the error may have the missing bytes
    │   └── OutOfMemory        a member of a job ran out of memory; the error has the bytes that its process had taken
    ├── NoCopy                 a machine cannot keep a backup of another machine's shard; training goes on without it
    ├── ContributorLost        a machine died or is unresponsive; retry or resume
    ├── StaleEpoch             a message or an operation that a later one or a later epoch supersedes; drop it
    ├── VerificationFailed     a result or stored data is missing, incomplete or wrong
    │   └── WrongTensor        a machine sent a tensor that the model cannot produce; one machine is excluded
    └── Unavailable            a needed service does not answer (control plane, head, disk); try again
        ├── Busy               a queue is full; try again after the seconds that the error has
        │   └── TooManyAttempts   too many wrong keys or invites came from this address
        ├── Fenced             another server took over the database; this server stops
        ├── ShardStoreLost     the actor that serves samples and weights died; members continue with a new actor
        └── LinkLost           the server's host was cut off from the machines of a job; the members continue later

Callers react to all errors of one class in the same way. Each error has one sentence about what happened. It also has
a hint that the reader can act on, the job, the step and the machine, where they are known. Errors of Ray, sockets and
torch are translated to these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self


class ShareComputeError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: one sentence about what happened; it needs no trailing full stop.
        hint: hint that the reader can act on.
        job: id of the job concerned.
        step: training step at which it happened.
        machine: name of the contributor concerned.
        details: further facts, JSON-serializable, e.g. ``missing_bytes``.
    """

    code: ClassVar[str] = "internal"
    """Stable machine-readable name; the last part of ``type`` in the HTTP problem document (RFC 9457)."""
    status: ClassVar[int] = 500
    """HTTP status of the response."""
    exit_code: ClassVar[int] = 1
    """Exit status of the command line."""

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


class Conflict(UserError):
    """The named object exists, but its state forbids the request."""

    code = "conflict"
    status = 409
    exit_code = 4


class NotAuthorized(UserError):
    """There is no key, or the key does not allow the request."""

    code = "not-authorized"
    status = 401
    exit_code = 5


class ClockSkew(UserError):
    """The clocks of two machines differ by more than certificates, leases and logs tolerate."""

    code = "clock-skew"


class TooLong(UserError):
    """The text is longer than the model's context window, or than the KV capacity of its machines."""

    code = "too-long"
    status = 400


class TooLarge(UserError):
    """The upload or body takes more space than the server allows; ``details`` has the size and the limit in bytes."""

    code = "too-large"
    status = 413


class VersionMismatch(Conflict):
    """Two machines run versions that do not work together; ``details`` has both versions."""

    code = "version-mismatch"


class InviteUnknown(NotAuthorized):
    """No invite has this code."""

    code = "invite-unknown"


class InviteUsed(Conflict):
    """All uses of the invite are taken by machines that joined with it."""

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
    """The key is valid, but lacks a scope; ``details`` has the required scope and the scopes of the key."""

    code = "missing-scope"
    status = 403


class NotOwner(NotAuthorized):
    """The object to change belongs to another key."""

    code = "not-owner"
    status = 403


class OtherSite(NotAuthorized):
    """A page of another site, or of unknown origin, made a browser send a request with its session cookie (CSRF)."""

    code = "other-site"
    status = 403


class InsecureTransport(NotAuthorized):
    """A secret would travel over plain HTTP between machines."""

    code = "insecure-transport"
    status = 403


class WrongFingerprint(NotAuthorized):
    """A server's key does not have the expected fingerprint; ``details`` has the expected and the actual one."""

    code = "wrong-fingerprint"


class UntrustedCertificate(NotAuthorized):
    """A server's certificate is expired, names another host, or is signed by no authority that this machine trusts."""

    code = "untrusted-certificate"


class PlanInfeasible(ShareComputeError):
    """There is no plan for the job or deployment on these machines.

    ``details`` has ``missing_bytes`` if it was computed.
    """

    code = "plan-infeasible"
    status = 422
    exit_code = 6


class OutOfMemory(PlanInfeasible):
    """A member of a job ran out of memory; ``details`` has the memory that its process had taken (``taken_bytes``)."""

    code = "out-of-memory"

    @property
    def taken_bytes(self) -> int:
        """Return the bytes that the process had taken.

        This is its peak of reserved GPU memory if the GPU ran out, otherwise its resident memory.
        """
        return int(self.details["taken_bytes"])


class NoCopy(ShareComputeError):
    """A machine cannot keep a backup of another machine's shard; training continues without this backup."""

    code = "no-copy"

    @property
    def lacks_space(self) -> bool:
        """Return whether the machine lacks memory or disk space for the backup; another machine may have enough."""
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
    """A machine died or is unresponsive; the job can be resumed."""

    code = "contributor-lost"
    status = 503
    exit_code = 7


class StaleEpoch(ShareComputeError):
    """A message or an operation is superseded, and is dropped.

    For example, it belongs to an earlier epoch of a job or deployment, or another coordinator has taken over the job.
    """

    code = "stale-epoch"
    status = 409


class VerificationFailed(ShareComputeError):
    """A result or stored data is missing, incomplete, damaged or not what was requested."""

    code = "verification-failed"
    status = 500


class WrongTensor(VerificationFailed):
    """A machine sent a tensor that the model cannot produce.

    A training job then excludes either the sender or the machine that reported the tensor.
    """

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


class Busy(Unavailable):
    """A queue, e.g. a deployment's, is full; ``details`` has the seconds to wait before a retry (``retry_after_s``)."""

    code = "busy"
    status = 429

    @property
    def retry_after_s(self) -> int:
        """Return the seconds after which to try again."""
        return int(self.details["retry_after_s"])


class Fenced(Unavailable):
    """Another server took over the database; this server writes nothing more, and stops."""

    code = "fenced"
    exit_code = 4


class TooManyAttempts(Busy):
    """An address sent too many wrong keys or invites; ``details`` says after how many seconds it may try again."""

    code = "too-many-attempts"


class ShardStoreLost(Unavailable):
    """The actor that serves samples and weights died; the job's members continue with a new actor."""

    code = "shard-store-lost"


class LinkLost(Unavailable):
    """Members did not reconnect after the coordinator's host had lost its network.

    The members still run; the job's next attempt continues with them.
    """

    code = "link-lost"


def as_ours(failure: Exception) -> ShareComputeError:
    """Return a `ShareComputeError` unchanged; wrap any other exception in one, so that users get a message and a hint.

    Exceptions of other classes were not raised on purpose: they are defects, or come from a user's code.
    """
    if isinstance(failure, ShareComputeError):
        return failure
    return ShareComputeError(
        f"{type(failure).__name__}: {failure}",
        hint="look at the job's log; if the cause is not yours, report it",
    )


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
