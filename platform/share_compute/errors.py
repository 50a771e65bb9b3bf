"""Every error that share-compute raises on purpose.

    ShareComputeError
    ├── UserError              mend the request: what was asked for cannot be done as asked
    │   ├── ClockSkew          the clocks of two machines differ too much
    │   ├── TooLong            the text is longer than the model's window
    │   ├── TooLarge           what is sent takes more space than the server gives it
    │   ├── NotFound           the thing named does not exist (any more)
    │   ├── Conflict           it exists, but its state forbids this now
    │   │   ├── InviteUsed     this invite has no use left
    │   │   └── VersionMismatch   two machines run versions that do not work together
    │   └── NotAuthorized      the key, invite or code does not allow this
    │       ├── InviteUnknown  no invite has this code
    │       ├── InviteExpired  its time is over
    │       ├── InviteRevoked  it was taken back
    │       ├── MissingScope   the key is valid, but may not do this; says which scope it lacks
    │       ├── NotOwner       it belongs to another key
    │       ├── OtherSite      a page of another site asks in a browser's name
    │       ├── InsecureTransport   a secret would travel over plain HTTP between machines
    │       ├── WrongFingerprint    the server's key is not the one that it is known by
    │       └── UntrustedCertificate   no authority that this machine trusts signed the server's certificate
    ├── PlanInfeasible         the machines cannot hold the job; says what is missing, in bytes
    │   └── OutOfMemory        a machine had less memory than it lends; says how much it had
    ├── NoCopy                 a machine cannot keep a copy of another's shard; training goes on without
    ├── ContributorLost        a machine died or went silent; retry or resume
    ├── StaleEpoch             a message of an earlier epoch; drop it
    ├── VerificationFailed     a result is not what it must be
    │   └── WrongTensor        a machine handed on a tensor that the model does not make; do without the machine
    └── Unavailable            something we need does not answer (control plane, head, disk); try again
        ├── Busy               a deployment's queue is full; try again after the seconds that it says
        │   └── TooManyAttempts   too many wrong keys or invites came from this address
        ├── Fenced             another server took over the database; this one ends
        ├── LibraryLost        the process that serves a job's samples died; its members live, and go on with another
        └── LinkLost           the server's host was cut from all others; its jobs' members live, and go on later

They are split by what the caller does next. Each says what happened in one sentence and carries one suggested
action (``mend``); job, step and machine where they are known. Errors of Ray, sockets and torch are translated to
these at one boundary each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self


class ShareComputeError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what happened, one sentence, no trailing full stop needed.
        mend: what the reader can do about it.
        job: id of the job concerned.
        step: training step at which it happened.
        machine: name of the contributor concerned.
        details: further JSON-able facts, e.g. ``missing_bytes``.
    """

    code: ClassVar[str] = "internal"
    """Stable machine-readable name, the last part of the problem document's ``type``."""
    status: ClassVar[int] = 500
    """HTTP status of the problem document."""
    exit_code: ClassVar[int] = 1
    """Exit status of the command line."""

    def __init__(
        self,
        message: str,
        *,
        mend: str | None = None,
        job: str | None = None,
        step: int | None = None,
        machine: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.mend = mend
        self.job = job
        self.step = step
        self.machine = machine
        self.details = details or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep every field when the error crosses a process."""
        return _rebuild, (type(self), self.message, self.facts())

    def facts(self) -> dict[str, Any]:
        """Return the fields beside the message that are set."""
        known = {
            "mend": self.mend,
            "job": self.job,
            "step": self.step,
            "machine": self.machine,
            "details": self.details,
        }
        return {name: value for name, value in known.items() if value not in (None, {})}


def _rebuild(kind: type[ShareComputeError], message: str, facts: dict[str, Any]) -> ShareComputeError:
    return kind(message, **facts)


class UserError(ShareComputeError):
    """What was asked for cannot be done as asked; mend the request."""

    code = "invalid-request"
    status = 422
    exit_code = 2


class NotFound(UserError):
    """The thing named does not exist, or not any more."""

    code = "not-found"
    status = 404
    exit_code = 3


class Conflict(UserError):
    """The thing named exists, but its state forbids this now."""

    code = "conflict"
    status = 409
    exit_code = 4


class NotAuthorized(UserError):
    """No key, or one that does not allow this."""

    code = "not-authorized"
    status = 401
    exit_code = 5


class ClockSkew(UserError):
    """The clocks of two machines differ by more than certificates, leases and logs can bear."""

    code = "clock-skew"


class TooLong(UserError):
    """The text is longer than the model's window, or than what its machines can keep of it."""

    code = "too-long"
    status = 400


class TooLarge(UserError):
    """What is sent takes more space than the server gives it; ``details`` has both, in bytes."""

    code = "too-large"
    status = 413


class VersionMismatch(Conflict):
    """Two machines run versions that do not work together; ``details`` has both."""

    code = "version-mismatch"


class InviteUnknown(NotAuthorized):
    """No invite has this code."""

    code = "invite-unknown"


class InviteUsed(Conflict):
    """As many machines joined with this invite as it has uses."""

    code = "invite-used"
    exit_code = 5


class InviteExpired(NotAuthorized):
    """The invite's time is over."""

    code = "invite-expired"
    status = 410


class InviteRevoked(NotAuthorized):
    """The invite was taken back."""

    code = "invite-revoked"
    status = 410


class MissingScope(NotAuthorized):
    """The key is valid, but lacks a scope; ``details`` has the one that is needed and those that it has."""

    code = "missing-scope"
    status = 403


class NotOwner(NotAuthorized):
    """What is to be changed belongs to another key."""

    code = "not-owner"
    status = 403


class OtherSite(NotAuthorized):
    """A page of another site, or something that does not say where it is from, asks in a browser's name."""

    code = "other-site"
    status = 403


class InsecureTransport(NotAuthorized):
    """A secret would travel over plain HTTP between machines."""

    code = "insecure-transport"
    status = 403


class WrongFingerprint(NotAuthorized):
    """A server does not have the key that it is known by; ``details`` says which was expected and seen."""

    code = "wrong-fingerprint"


class UntrustedCertificate(NotAuthorized):
    """A server's certificate is signed by no authority that this machine trusts, is expired, or is another host's."""

    code = "untrusted-certificate"


class PlanInfeasible(ShareComputeError):
    """These machines cannot hold this job; ``details`` says how many bytes are missing."""

    code = "plan-infeasible"
    status = 422
    exit_code = 6


class OutOfMemory(PlanInfeasible):
    """A machine had less memory than it lends; ``details`` says how much its process had taken (``room_bytes``)."""

    code = "out-of-memory"

    @property
    def room_bytes(self) -> int:
        """Memory that the process had taken."""
        return int(self.details["room_bytes"])


class NoCopy(ShareComputeError):
    """A machine cannot keep a copy of another's shard; training goes on without."""

    code = "no-copy"

    @property
    def lacks_room(self) -> bool:
        """Whether the machine has no room for it, and another one may have."""
        return bool(self.details.get("lacks_room"))

    @property
    def owner(self) -> str:
        """Contributor whose shard it was a copy of."""
        return str(self.details.get("owner", ""))

    @property
    def epoch(self) -> int:
        """In which it was lost."""
        return int(self.details.get("epoch", 0))


class ContributorLost(ShareComputeError):
    """A machine died or went silent; the job can be resumed."""

    code = "contributor-lost"
    status = 503
    exit_code = 7


class StaleEpoch(ShareComputeError):
    """A message of an earlier epoch; the receiver drops it."""

    code = "stale-epoch"
    status = 409


class VerificationFailed(ShareComputeError):
    """A result is not what it must be; its machine is set aside."""

    code = "verification-failed"
    status = 500


class WrongTensor(VerificationFailed):
    """A machine handed on a tensor that is not what the model says; it counts as lost."""

    code = "wrong-tensor"

    @classmethod
    def of(cls, machine: str, worker: str, what: str, step: int | None = None) -> Self:
        """Return the error for a tensor of one machine.

        Args:
            machine: its name.
            worker: its id.
            what: is wrong with the tensor.
            step: of the job, if it is known.
        """
        return cls(
            f"{machine} sent a wrong tensor: {what}",
            machine=machine,
            step=step,
            mend=f"check the memory and the software of {machine}; the job goes on without it",
            details={"worker": worker, "what": what},
        )

    @property
    def worker(self) -> str:
        """Contributor that sent it."""
        return str(self.details.get("worker", ""))

    @property
    def what(self) -> str:
        """What is wrong with the tensor."""
        return str(self.details.get("what", ""))

    @property
    def accuser(self) -> str:
        """Contributor that says so."""
        return str(self.details.get("accuser", ""))


class Unavailable(ShareComputeError):
    """Something that is needed does not answer; try again."""

    code = "unavailable"
    status = 503
    exit_code = 8


class Busy(Unavailable):
    """A deployment's queue is full; ``details`` says when to try again (``retry_after_s``)."""

    code = "busy"
    status = 429

    @property
    def retry_after_s(self) -> int:
        """Time after which to try again."""
        return int(self.details["retry_after_s"])


class Fenced(Unavailable):
    """Another server took over the database: this one writes nothing more, and ends."""

    code = "fenced"
    exit_code = 4


class TooManyAttempts(Busy):
    """Too many wrong keys or invites came from an address; ``details`` says when to try again."""

    code = "too-many-attempts"


class LibraryLost(Unavailable):
    """The process that serves a job's samples died; its members live, and go on with another one."""

    code = "library-lost"


class LinkLost(Unavailable):
    """The server's host was cut from all others; a job's members live, and go on with another coordinator."""

    code = "link-lost"


def as_ours(failure: Exception) -> ShareComputeError:
    """Return a failure as it is told to people: one that nobody raised on purpose is a defect, or a user's code."""
    if isinstance(failure, ShareComputeError):
        return failure
    return ShareComputeError(
        f"{type(failure).__name__}: {failure}",
        mend="look at the job's log; if the cause is not yours, report it",
    )


def error_of(
    code: str,
    detail: str,
    facts: Mapping[str, Any],
    *,
    unknown: type[ShareComputeError] = ShareComputeError,
) -> ShareComputeError:
    """Return the error that somebody else raised.

    Args:
        code: its stable name.
        detail: its message.
        facts: what it says beside that; other keys are left out.
        unknown: what it is if no error of ours has this name.
    """
    known = {name: facts.get(name) for name in ("mend", "job", "step", "machine", "details")}
    return _kinds().get(code, unknown)(detail, **known)


def _kinds() -> dict[str, type[ShareComputeError]]:
    kinds: dict[str, type[ShareComputeError]] = {}
    todo: list[type[ShareComputeError]] = [ShareComputeError]
    while todo:
        kind = todo.pop()
        kinds[kind.code] = kind
        todo += kind.__subclasses__()
    return kinds
