"""Translates errors of the Hugging Face Hub's client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from share_compute.errors import NotAuthorized, NotFound, Unavailable, UserError

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may do it"


@contextmanager
def translated(repository: str, *, uses_token: bool) -> Iterator[None]:
    """Convert an error of huggingface_hub from the block to a `ShareComputeError` about ``repository``.

    Args:
        repository: name of the repository.
        uses_token: whether the requests are sent with a token of the Hub, if there is one.

    Raises:
        NotFound: the repository, revision or file does not exist, or is private.
        NotAuthorized: the token is missing or lacks the permission, or the repository is gated.
        Unavailable: the Hub does not answer, or reports an internal error.
        UserError: the name of the repository is invalid, or the Hub refuses the request.
    """
    from httpx2 import HTTPError
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    send = f"download it with your own account (hf download {repository}), and send it: share-compute upload FOLDER"
    try:
        yield
    except HFValidationError as failure:
        raise UserError(
            f"{repository} is no name of a repository", hint="write it as OWNER/NAME, as on the Hub"
        ) from failure
    except LocalTokenNotFoundError as failure:
        raise NotAuthorized("the Hub needs a token, and there is none", hint=_LOG_IN) from failure
    except GatedRepoError as failure:
        hint = (
            "accept its terms on its page on the Hub, then log in with `hf auth login`"
            if uses_token
            else send
        )
        raise NotAuthorized(
            f"{repository} is gated: its owner grants access on request", hint=hint
        ) from failure
    except RevisionNotFoundError as failure:
        raise NotFound(
            f"{repository} has no such revision", hint="name a branch, a tag or a commit of the repository"
        ) from failure
    except RepositoryNotFoundError as failure:
        # The Hub gives this answer for missing and private repositories, and for invalid tokens.
        hint = f"check the name; if it is private, {_LOG_IN if uses_token else send}"
        raise NotFound(f"the Hub shows no repository {repository}", hint=hint) from failure
    except HfHubHTTPError as failure:
        raise _of_status(repository, failure.response.status_code, failure.server_message) from failure
    except (HTTPError, OfflineModeIsEnabled, ConnectionError, TimeoutError) as failure:
        said = re.sub(r"^\[Errno -?\d+\] ", "", str(failure).partition("\n")[0]) or type(failure).__name__
        raise Unavailable(
            f"the Hub cannot be reached for {repository}: {said}",
            hint="check the network and HF_ENDPOINT, and try again",
        ) from failure


def _of_status(repository: str, status: int, message: str | None) -> Exception:
    said = f": {message}" if message else ""
    if status in (401, 403):
        return NotAuthorized(f"the Hub refuses access to {repository}{said}", hint=_LOG_IN)
    if status == 404:
        return NotFound(f"the Hub has no such file of {repository}", hint="check the name and the revision")
    if status == 429 or status >= 500:
        return Unavailable(
            f"the Hub answers with status {status} for {repository}{said}", hint="try again later"
        )
    return UserError(
        f"the Hub refuses the request for {repository}{said}", hint="check the repository's settings"
    )
