"""Every error that share-compute raises on purpose.

    ShareComputeError
    ├── UserError              mend the request: what was asked for cannot be done as asked
    │   ├── ClockSkew          the clocks of two machines differ too much
    │   ├── NotFound           the thing named does not exist (any more)
    │   ├── Conflict           it exists, but its state forbids this now
    │   │   ├── InviteUsed     somebody joined with this invite already
    │   │   └── VersionMismatch   two machines run versions that do not work together
    │   └── NotAuthorized      the key, invite or code does not allow this
    │       ├── InviteUnknown  no invite has this code
    │       ├── InviteExpired  its time is over
    │       └── InviteRevoked  it was taken back
    ├── PlanInfeasible         the machines cannot hold the job; says what is missing, in bytes
    ├── ContributorLost        a machine died or went silent; retry or resume
    ├── StaleEpoch             a message of an earlier epoch; drop it
    ├── VerificationFailed     a result is not what it must be; quarantine its machine
    └── Unavailable            something we need does not answer (control plane, head, disk); try again

They are split by what the caller does next. Each says what happened in one sentence and carries one suggested
action (``mend``); job, step and machine where they are known. Errors of Ray, sockets and torch are translated to
these at one boundary each.
"""

from __future__ import annotations

from typing import Any, ClassVar


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


class VersionMismatch(Conflict):
    """Two machines run versions that do not work together; ``details`` has both."""

    code = "version-mismatch"


class InviteUnknown(NotAuthorized):
    """No invite has this code."""

    code = "invite-unknown"


class InviteUsed(Conflict):
    """Somebody joined with this invite already; each works once."""

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


class PlanInfeasible(ShareComputeError):
    """These machines cannot hold this job; ``details`` says how many bytes are missing."""

    code = "plan-infeasible"
    status = 422
    exit_code = 6


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


class Unavailable(ShareComputeError):
    """Something that is needed does not answer; try again."""

    code = "unavailable"
    status = 503
    exit_code = 8
