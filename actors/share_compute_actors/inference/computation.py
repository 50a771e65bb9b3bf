"""Chooses whether a deployment computes with compiled or with eager code.

The control plane stores one choice for all replicas. So the first replica only proposes a choice, and its stages serve
after the control plane has answered with the stored choice.
"""

from __future__ import annotations

from collections.abc import Collection

from share_compute.errors import CompilerFailed
from share_compute.lifecycle.computation import Computation
from share_compute.protocol.membership import Worker
from share_compute.specification import ServeJob
from share_compute_actors.compiled.choice import choose, gain_of
from share_compute_actors.inference.serving_group import ServingGroup


class ComputationChooser:
    """Proposes the choice of a deployment, and follows the stored one.

    Args:
        spec: the deployment.
        known: the stored choice; None if there is none.
        group: members of this replica.
    """

    def __init__(self, spec: ServeJob, known: Computation | None, group: ServingGroup) -> None:
        self._spec = spec
        self._group = group
        self.proposal: Computation | None = None
        """The choice that this replica proposes; None before it was measured, and once a choice is stored."""
        self.is_chosen = spec.compile == "off"
        """Whether members may compute: the choice is stored, or there is none to make."""
        if known is not None:
            self.follow(known)

    def follow(self, stored: Computation) -> None:
        """Make members compute as the stored choice says, from their next `ServingGroup.load` on."""
        if not self.is_chosen:
            self.is_chosen, self.proposal = True, None
            self._group.is_compiled = stored.is_compiled

    def propose(self, workers: Collection[Worker], concurrent: int) -> None:
        """Measure compiled and eager code on some members that have loaded their shards, unless there is a proposal.

        Raises:
            Cancelled: the replica was stopped.
            MembersLost: members were lost meanwhile.
        """
        if self.proposal is not None:
            return
        try:
            times = self._group.compare_compiled(workers, concurrent)
        except CompilerFailed as failure:
            self.proposal = Computation(is_compiled=False, sentence=f"eager, because {failure.message}")
        else:
            # A single token passes all stages in sequence; many sequences keep the slowest stage busy.
            total = sum if self._spec.objective == "latency" else max
            self.proposal = choose(self._spec.compile, times, gain_of(times, total))
