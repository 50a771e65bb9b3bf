"""Finds a machine by its name or id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from share_compute.errors import NotFound

if TYPE_CHECKING:
    from share_compute.store.records import ContributorRecord


def machine_called(name_or_id: str, machines: Sequence[ContributorRecord]) -> ContributorRecord:
    """Return the first machine with this name or id.

    Raises:
        NotFound: there is none; the error suggests a machine with a similar name.
    """
    from share_compute.files.strict import suggestion

    found = next((one for one in machines if name_or_id in (one.id, one.name)), None)
    if found is None:
        names = [one.name for one in machines]
        raise NotFound(
            f"there is no machine {name_or_id}{suggestion(name_or_id, names)}",
            hint="share-compute contributors lists names and ids",
        )
    return found
