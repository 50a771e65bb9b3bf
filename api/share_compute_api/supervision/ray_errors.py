"""Where Ray's errors over an actor of ours become ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from share_compute.errors import ContributorLost, ShareComputeError, Unavailable


@contextmanager
def translated(who: str, *, mistake_mend: str, loss_mend: str, job: str | None = None) -> Iterator[None]:
    """Raise in place of Ray's errors what people can do something about.

    Args:
        who: the actor, as the beginning of a sentence.
        mistake_mend: what to do where it failed.
        loss_mend: what to do where its process died, or cannot be reached.
        job: the job that it works for.

    Raises:
        ShareComputeError: the actor raised it.
        Unavailable: it made a mistake, or Ray does not answer.
        ContributorLost: its process died.
    """
    from ray.exceptions import RayActorError, RayError, RayTaskError

    try:
        yield
    except RayTaskError as failure:
        cause = failure.cause
        if isinstance(cause, ShareComputeError):
            raise cause from failure
        reason = f"{type(cause).__name__}: {first_line(cause)}"
        raise Unavailable(f"{who} made a mistake: {reason}", mend=mistake_mend, job=job) from failure
    except RayActorError as failure:
        raise ContributorLost(f"{who} died: {first_line(failure)}", mend=loss_mend, job=job) from failure
    except RayError as failure:
        raise Unavailable(f"Ray does not answer: {first_line(failure)}", mend=loss_mend, job=job) from failure


def first_line(failure: BaseException) -> str:
    """Return the part of Ray's error that is for people; the rest is traces and advice to developers."""
    return next((line.strip() for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
