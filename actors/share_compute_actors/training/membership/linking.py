"""Links the members of an epoch: channels between all members, a process group in each stage, and backup copies."""

from __future__ import annotations

from collections.abc import Callable

from share_compute.planning.plan import Plan
from share_compute.protocol.membership import Membership, Worker
from share_compute_actors.group.channels import open_channels
from share_compute_actors.group.exceptions import MembersLost
from share_compute_actors.messages import Followed
from share_compute_actors.training.membership.cuts import require_links
from share_compute_actors.training.membership.training_group import DEADLINE_S, TrainingGroup
from share_compute_actors.transport.rendezvous import Rendezvous
from share_compute_actors.wire import NOTHING


class MemberLinks:
    """Links the members of one job before each epoch.

    Args:
        group: the members.
        note: called with each line for the job's log.
    """

    def __init__(self, group: TrainingGroup, note: Callable[[str], None]) -> None:
        self._group = group
        self._note = note

    def make(self, membership: Membership, plan: Plan) -> None:
        """Link all members of an epoch, before it begins.

        Args:
            membership: membership of the epoch.
            plan: the plan that the epoch carries out; it sets the algorithm by which each stage sums its gradients.

        Raises:
            MembersLost: members died during the call.
            ContributorLost: the job requests direct links, and a direct link does not work; or a process group was not
                formed in time.
            LinksCut: members that must communicate cannot reach each other.
            StaleEpoch: a later epoch has begun, or a message between members was lost.
        """
        group, workers = self._group, membership.everybody
        if gone := set(workers) - group.workers:
            raise MembersLost(gone)
        if not open_channels(group, membership.epoch, workers, group.wanted_channel, self._note):
            require_links(group, membership)
        self._form(membership, plan)
        self._keep_copies(membership)

    def _form(self, membership: Membership, plan: Plan) -> None:
        """Have the members of each stage form a process group."""
        group = self._group
        calls = {}
        for place, stage in enumerate(membership.stages):
            for rank, worker in enumerate(stage):
                meeting = None
                sums = plan.stages[place].sums
                if sums is not None:
                    meeting = Rendezvous(
                        group=f"{group.attempt}/{membership.epoch}/{place}",
                        members=tuple(stage),
                        timeout_s=DEADLINE_S,
                        address=group.topology[worker].address,
                        algorithm=sums.algorithm,
                        sites=sums.sites,
                    )
                calls[worker] = group.handle(worker).form.remote(membership.epoch, meeting, rank, len(stage))
        group.gather(NOTHING, calls)

    def _keep_copies(self, membership: Membership) -> None:
        """Have each member keep copies of the shards that the membership assigns to it, and drop its other copies."""
        group = self._group
        followed: dict[Worker, dict[int, Followed]] = {worker: {} for worker in membership.everybody}
        for place, stage in enumerate(membership.stages):
            for owner in stage:
                for number, holder in enumerate(membership.copy_holders(owner)):
                    followed[holder][place] = Followed(
                        owner, group.handle(owner), membership.part_of(owner), number
                    )
        group.gather(
            NOTHING,
            {
                worker: group.handle(worker).keep_copies.remote(
                    membership.epoch, membership.step - 1, owners, membership.copy_holders(worker)
                )
                for worker, owners in followed.items()
            },
        )
