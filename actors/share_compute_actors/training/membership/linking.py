"""Links the members of an epoch: channels between all members, a group in each stage, and backup copies."""

from __future__ import annotations

from collections.abc import Callable

from share_compute.protocol.roster import Roster, Worker
from share_compute_actors.group.channels import open_channels
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.messages import Followed
from share_compute_actors.training.membership.cuts import require_links
from share_compute_actors.training.membership.training_group import DEADLINE_S, TrainingGroup
from share_compute_actors.transport.rendezvous import Rendezvous
from share_compute_actors.wire import NOTHING


class Links:
    """All links between the members of one job, made again for each epoch.

    Args:
        crew: the members.
        note: receives lines for the job's log.
    """

    def __init__(self, crew: TrainingGroup, note: Callable[[str], None]) -> None:
        self._crew = crew
        self._note = note

    def make(self, roster: Roster) -> None:
        """Link all members of an epoch, before it begins.

        Raises:
            MembersLost: machines died meanwhile.
            ContributorLost: the job asks for direct links, and one does not work.
            LinksCut: members that must communicate do not reach each other.
            StaleEpoch: a later epoch has begun.
        """
        crew, workers = self._crew, roster.everybody
        if gone := set(workers) - crew.workers:
            raise MembersLost(gone)
        if not open_channels(crew, roster.epoch, workers, crew.wanted_channel, self._note):
            require_links(crew, roster)
        self._form(roster)
        self._keep_copies(roster)

    def _form(self, roster: Roster) -> None:
        """Have the members of each stage form a communication group."""
        crew = self._crew
        calls = {}
        for place, stage in enumerate(roster.stages):
            for rank, worker in enumerate(stage):
                meeting = None
                if len(stage) > 1:
                    meeting = Rendezvous(
                        group=f"{crew.attempt}/{roster.epoch}/{place}",
                        members=tuple(stage),
                        timeout_s=DEADLINE_S,
                        address=crew.topology[worker].address,
                    )
                calls[worker] = crew.handle(worker).form.remote(roster.epoch, meeting, rank, len(stage))
        crew.gather(NOTHING, calls)

    def _keep_copies(self, roster: Roster) -> None:
        """Tell each member the primaries whose shards it keeps copies of."""
        crew = self._crew
        followed: dict[Worker, dict[int, Followed]] = {worker: {} for worker in roster.everybody}
        for place, stage in enumerate(roster.stages):
            for owner in stage:
                for number, keeper in enumerate(roster.keepers(owner)):
                    followed[keeper][place] = Followed(
                        owner, crew.handle(owner), roster.shards[place], number
                    )
        crew.gather(
            NOTHING,
            {
                worker: crew.handle(worker).keep_copies.remote(
                    roster.epoch, roster.step - 1, owners, roster.keepers(worker)
                )
                for worker, owners in followed.items()
            },
        )
