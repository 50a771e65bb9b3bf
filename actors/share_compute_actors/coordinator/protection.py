"""Finds out when each layer of a job is on two machines, so that the loss of any one machine costs no step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from share_compute.jobs.events import Protection
from share_compute.protocol.roster import Roster
from share_compute_actors.coordinator.crew import Crew


class ProtectionWatch:
    """Asks the members that keep copies, until all copies of an epoch are whole.

    Args:
        crew: the members.
        tell: takes what changed.
    """

    def __init__(self, crew: Crew, tell: Callable[[Protection], None]) -> None:
        self._crew = crew
        self._tell = tell
        self._roster: Roster | None = None
        """Of the epoch whose copies are waited for; None once they are whole, or one of them is lost."""
        self._asked: dict[Any, str] = {}
        """Questions that are not answered yet, and to whom."""
        self._is_protected = False

    def reform(self, roster: Roster) -> None:
        """Begin with an epoch; the event that reports it says that the job is not protected yet."""
        is_alone = (pool[0] not in roster.buddies for pool in roster.pools if len(pool) == 1)
        self._roster, self._asked, self._is_protected = None if any(is_alone) else roster, {}, False

    def lose_copy(self, step: int) -> None:
        """Take note that a copy is lost: another one is begun with the next epoch.

        Args:
            step: the last committed one.
        """
        self._roster = None
        if self._is_protected:
            self._is_protected = False
            self._tell(Protection(step=step, is_protected=False))

    def look(self, step: int) -> None:
        """Ask members, and report when all copies are whole; never waits.

        Args:
            step: the last committed one.
        """
        if self._roster is None:
            return
        if not self._asked:
            self._asked = self._crew.ask_for_whole_copies(set(self._roster.buddies.values()))
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        if len(answered) < len(self._asked):
            return
        asked, self._asked = self._asked, {}
        if all(self._crew.is_affirmed(worker, ref) for ref, worker in asked.items()):
            self._roster, self._is_protected = None, True
            self._tell(Protection(step=step, is_protected=True))
