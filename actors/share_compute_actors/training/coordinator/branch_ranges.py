"""The exchange of one branch with the machines that merge ranges of the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from share_compute.backoff import backoff_s
from share_compute.errors import (
    ContributorLost,
    ShareComputeError,
    StaleEpoch,
    VerificationFailed,
)
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.lifecycle.branch_ids import owner_of, ranges_id
from share_compute.synchronization.records import BranchRun
from share_compute_actors.group.answering import answered
from share_compute_actors.group.exceptions import Cancelled, MembersLost
from share_compute_actors.group.naming import named_member
from share_compute_actors.messages import Source, Sources
from share_compute_actors.training.coordinator.checkpoint_manager import CheckpointManager
from share_compute_actors.training.coordinator.conductor import Conductor
from share_compute_actors.training.coordinator.connections import Connections
from share_compute_actors.training.member.merging import RangesOfUpdate
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.training.rounds.messages import (
    BranchUpdate,
    ContributionPart,
    RangeAddress,
    servers_of_ranges,
)
from share_compute_actors.training.rounds.range_server import RECEIVED, RUN, SOURCES, RemoteSource
from share_compute_actors.training.shard_store import TrainingState
from share_compute_actors.wire import NAMES, Undeclared

_RETRY_S = 0.5
"""First pause before a lost part is sent again, in seconds."""
_LONGEST_RETRY_S = 5.0
"""Longest pause before a lost part is sent again, in seconds."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A complete contribution, in a folder of the server or in parts."""

    folder: Path | None = None
    key: str = ""
    parts: tuple[ContributionPart, ...] = ()
    fault: str = ""
    """Defect that the receiver found; empty if there is none."""


class BranchRanges:
    """Sends contributions of a branch to the machines with ranges of the weights, and finds their updates.

    Args:
        assignment: the attempt at the branch.
        connections: connections with the synchronizer and the control plane.
        group: the members.
        conductor: runs the calls of members while training is paused.
        checkpoints: saves the state of the branch before a suspension.
    """

    def __init__(
        self,
        assignment: Assignment,
        connections: Connections,
        group: TrainingGroup,
        conductor: Conductor,
        checkpoints: CheckpointManager,
    ) -> None:
        assert assignment.branch is not None
        self._assignment = assignment
        self._branch = assignment.branch
        self._connections = connections
        self._group = group
        self._conductor = conductor
        self._checkpoints = checkpoints
        self._actors: dict[str, Any] = {}

    def send(self, number: int, state: TrainingState) -> Sent:
        """Send the contribution to a round; wait until the server of each range has its part.

        Call this only while training is paused.

        Args:
            number: the round.
            state: training state after the last step of the round.
        """
        return self._conductor.at_pause(partial(self._send, number, state))

    def _send(self, number: int, state: TrainingState) -> Sent:
        branch = self._branch
        # If the branch restarts without its state, it may compute another contribution to the same round.
        key = f"{number:08}-{branch.number:04}-{self._assignment.attempt:06}-{branch.start:04}"
        first = [stage[0] for stage in self._conductor.membership.stages]
        names = self._group.ask(NAMES, first, "offer_contribution")
        members = [RemoteSource(self._group.name(worker), worker, names[worker]) for worker in first]
        handles = [self._group.handle(worker) for worker in first]
        arguments = key, RUN.pack(BranchRun(number, branch.number)), SOURCES.pack(tuple(members)), *handles
        parts: dict[str, ContributionPart] = {}
        repeats = 0
        while True:
            servers = self._servers()
            calls = {
                server: actor.receive.remote(*arguments)
                for server in servers
                if server.actor not in parts and (actor := self._actor(server)) is not None
            }
            self._group.wait(list(calls.values())) if calls else None
            for server, call in calls.items():
                part: ContributionPart | ShareComputeError | None = self._received(server, call)
                if isinstance(part, ShareComputeError):
                    return Sent(key=key, fault=part.message)
                if part is not None:
                    parts[server.actor] = part
            if servers and all(server.actor in parts for server in servers):
                return Sent(key=key, parts=tuple(parts[server.actor] for server in servers))
            self._require_all(state)
            time.sleep(backoff_s(_RETRY_S, repeats, _LONGEST_RETRY_S))
            repeats += 1

    def _require_all(self, state: TrainingState) -> None:
        """Stop waiting for a server of a range if members are lost, or if the attempt should end."""
        if self._connections.requests.cancelled.is_set():
            raise Cancelled
        if lost := self._group.check_members():
            raise MembersLost(lost)
        self._checkpoints.suspend_if_requested(state)

    def _received(self, server: RangeAddress, call: Any) -> ContributionPart | ShareComputeError | None:
        """Return the part that a machine stored, or a defect of the contribution, or None if the machine was lost."""
        try:
            received = answered(RECEIVED, call, server.name)
        except StaleEpoch:  # a member was lost
            raise
        except RayError:  # the synchronizer notices the loss as well
            self._actors.pop(server.actor, None)
            return None
        except ShareComputeError as failure:
            is_defect = isinstance(failure, (ContributorLost, VerificationFailed))
            if is_defect and not isinstance(failure, Undeclared):
                return failure
            # For example, its disk is full.
            reason = f"{server.name} cannot store a contribution: {failure.message}"
            self._connections.synchronizer.accuse_range_server.remote(server.actor, reason)
            self._actors.pop(server.actor, None)
            return None
        return ContributionPart(
            actor=server.actor,
            machine=server.machine,
            digest=received.digest,
            size_bytes=received.size_bytes,
        )

    def _servers(self) -> Sequence[RangeAddress]:
        answer = self._connections.synchronizer.range_servers.remote()
        self._group.wait([answer])
        return servers_of_ranges.validate_json(ray.get(answer))

    def _actor(self, server: RangeAddress) -> Any:
        """Return the actor of the server of a range; None if it is dead."""
        if server.actor not in self._actors:
            try:
                job_id = owner_of(self._assignment.job_id)
                self._actors[server.actor] = named_member(ranges_id(job_id), server.actor)
            except ValueError:
                return None
        return self._actors[server.actor]

    def sources(self, update: BranchUpdate) -> RangesOfUpdate | None:
        """Return the machines from which members load an update; None if members load it from the server."""
        found = []
        for server in update.servers:
            actor = self._actor(server)
            if actor is None:
                return None
            found.append(Source(actor, server.name, server.machine))
        if not found:
            return None
        return RangesOfUpdate(
            folder=f"updates/{update.version:08}",
            sources=Sources(tuple(found), {name: place for name, (place, _) in update.payloads.items()}),
            digests={name: digest for name, (_, digest) in update.payloads.items()},
        )
