"""The worker group of a training job, through which the coordinator calls the job's members."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from share_compute.device_kinds import KINDS
from share_compute.errors import CompilerFailed, LinkLost, ShareComputeError, StaleEpoch
from share_compute.lifecycle.attempt_events import Assignment
from share_compute.models.cells import derive_seed
from share_compute.planning.plan import Plan
from share_compute.protocol.membership import ShardPart, Worker
from share_compute.protocol.messages import ToMember
from share_compute.quantities import bytes_text, listed
from share_compute.shards import Shard
from share_compute.topology import Contributor, Topology
from share_compute.training.shares import OptimizerShare
from share_compute_actors.compiled.choice import COMPILED_TIMES, CompiledTimes
from share_compute_actors.group.answering import answered
from share_compute_actors.group.exceptions import Cancelled, MembersLost
from share_compute_actors.group.naming import gpu_options, member_options
from share_compute_actors.group.worker_group import WorkerGroup
from share_compute_actors.messages import MemberSetup, MemberStatus, Source, Sources, server_source
from share_compute_actors.training.member.member import Member
from share_compute_actors.training.member.schemas import STATUS
from share_compute_actors.training.membership.epochs import shares_of
from share_compute_actors.training.shard_store import ShardStoreFacts
from share_compute_actors.transport.traffic import RateLimits
from share_compute_actors.unpickling import is_refusal
from share_compute_actors.wire import COUNT, FLAG, NAMES, NOTHING, Undeclared

DEADLINE_S = 900.0
"""Longest wait of one member for another, in seconds, for any reason.

The failure detector notices a dead or unresponsive machine much sooner."""


class TrainingGroup(WorkerGroup):
    """All members of one training job that are not known to be lost.

    Args:
        assignment: the attempt, with a fixed number of microbatches.
        facts: the facts that the shard store returned.
        shard_store: the shard store's actor.
        coordinator: actor that members send their messages to.
        cancelled: set when the submitter cancels the job.
        runs: `SummationTree.runs` of the job: number of consecutive microbatch ids in each run.
        tied_name: stored name of the parameter that the first and the last stage share; None if there is none.
        note: called with each line for the job's log.
    """

    def __init__(
        self,
        assignment: Assignment,
        facts: ShardStoreFacts,
        shard_store: Any,
        coordinator: Any,
        cancelled: threading.Event,
        runs: tuple[int, ...],
        tied_name: str | None,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(assignment.topology, cancelled, STATUS, note)
        self._note = note
        self._assignment = assignment
        self._facts = facts
        self._shard_store = shard_store
        self._coordinator = coordinator
        self._runs = runs
        self._tied_name = tied_name
        self.compiles = False
        """Whether members that start compile their layers. A member that then fails to compile is lost."""
        self._invited: dict[Worker, tuple[Any, Any]] = {}
        """Actor and pending call of `Member.build`, by member; only of started members that are not admitted yet."""
        self._refused: set[tuple[Worker, str]] = set()
        """Machines on which a member failed to start, each with the id of its Ray node."""

    @property
    def wanted_channel(self) -> Literal["auto", "direct", "ray"]:
        """Transport of tensors, as requested by the job."""
        return self._assignment.spec.parallelism.channel

    @property
    def microbatches(self) -> int:
        """Number of microbatches in a step."""
        return sum(self._runs)

    @property
    def attempt(self) -> str:
        """Name of the job's attempt, unique in the cluster."""
        return f"{self._assignment.job_id}/{self._assignment.attempt}"

    def cut_off(self, workers: frozenset[Worker]) -> frozenset[Worker]:
        """End this attempt, so that another coordinator continues with all members over new connections.

        Raises:
            LinkLost: always.
        """
        names = listed(sorted(map(self.name, workers)))
        raise LinkLost(
            f"the server was cut off from its machines, and connections to {names} were not restored",
            hint="no action needed: another coordinator continues with the same members",
        )

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def _start(self, worker: Worker, applied: int) -> Any:
        """Start a member on its contributor and return it.

        Args:
            worker: the contributor's id.
            applied: last step whose update is in the first weights that the member will load; -1 if unknown.
        """
        machine = self.topology[worker]
        most_threads = self._assignment.spec.parallelism.threads or machine.threads
        training, branch = self._assignment.spec.training, self._assignment.branch
        rounds = training.rounds
        training = training.model_copy(update={"compile": "on" if self.compiles else "off"})
        if branch is not None:  # branches draw different dropout
            seed = derive_seed("branch", training.seed, branch.number)
            training = training.model_copy(update={"seed": seed})
        setup = MemberSetup(
            job=self._assignment.job_id,
            worker=worker,
            name=machine.name,
            address=machine.address,
            blueprint=self._facts.blueprint,
            training=training,
            runs=self._runs,
            threads=min(machine.threads, most_threads),
            device=machine.device.kind,
            gpus=tuple(device.uuid for device in machine.used),
            deadline_s=DEADLINE_S,
            applied=applied,
            version=self._facts.version,
            tied=self._tied_name,
            reads_full_batch=self._assignment.spec.data.slicing == "full_batch",
            lent_bytes=sum(
                device.memory_bytes for device in machine.devices if KINDS[device.kind].uses_main_memory
            ),
            slices=self._assignment.spec.parallelism.sequence,
            ranks=self._assignment.spec.parallelism.tensor,
            lent_devices=len(machine.group),
            operators=self._assignment.spec.parallelism.operators,
            limits=RateLimits(machine.upload_bytes_per_s, machine.download_bytes_per_s),
            failures=self._assignment.failures,
        )
        return Member.options(  # type: ignore[attr-defined]
            scheduling_strategy=NodeAffinitySchedulingStrategy(machine.node_id, soft=False),
            **member_options(self._assignment.job_id, worker, self._assignment.attempt),
            **gpu_options(
                machine.device.kind, 1 if rounds is None else rounds.branches, devices=len(machine.used)
            ),
        ).remote(setup, self._coordinator, self.issue_key(worker))

    def attach(self, actors: Mapping[Worker, Any]) -> None:
        """Take over members of an earlier attempt, each with its shard.

        Raises:
            MembersLost: all members died during the call.
        """
        self._actors.update(actors)
        self.detector.are_loading = False
        self.gather(
            NOTHING,
            {
                worker: actor.follow.remote(self._coordinator, self._shard_store, self.issue_key(worker))
                for worker, actor in actors.items()
            },
            skips_lost=True,
        )

    def load(self, plan: Plan) -> None:
        """Start all members of a plan; have them load shards from the shard store, or initialize them from the seed.

        Members that die during the call are left out.

        Raises:
            MembersLost: all members died.
            PlanInfeasible: a shard does not fit into its machine's memory, contrary to the plan's estimate.
        """
        shards = {
            member.contributor_id: plan.shard(place)
            for place, stage in enumerate(plan.stages)
            for member in stage.members
        }
        shares = shares_of(plan, shares_optimizer=self._assignment.spec.parallelism.shares_optimizer)
        applied = self._facts.first_step - 1
        for worker in shards:
            self._actors[worker] = self._start(worker, applied)
        self._note("members are loading their shards")
        sources = self.beginning
        sizes = self.gather(
            COUNT,
            {
                worker: self._actors[worker].load.remote(
                    self._shard_store, shard, sources, applied, shares[worker]
                )
                for worker, shard in shards.items()
            },
            skips_lost=True,
        )
        for worker, size in sizes.items():
            self._note(f"{self.name(worker)} holds {bytes_text(size)} of weights")
        adopted = self.gather(
            NOTHING,
            {worker: self._actors[worker].adopt.remote(0, applied) for worker in self.workers & sizes.keys()},
            skips_lost=True,
        )
        for worker in sorted(shards.keys() - adopted.keys()):
            self._note(f"lost machine {self.name(worker)} while it loaded")
        self.detector.are_loading = False

    def _explain(self, worker: Worker, failure: RayError | ShareComputeError) -> set[Worker]:
        if isinstance(failure, CompilerFailed) and self.compiles:
            self.detector.accuse(worker, failure)
            # the next `check_members` reports the lost member; the results of the others stay the same
            return set()
        return super()._explain(worker, failure)

    def compare_compiled(self) -> dict[Worker, CompiledTimes]:
        """Have all members compile their layers, and return the times of eager and compiled code, by member.

        Members that die during the call are left out.

        Raises:
            CompilerFailed: a member cannot compile its layers.
            MembersLost: all members died.
        """
        self.detector.are_loading = True
        try:
            calls = {worker: actor.compare_compiled.remote() for worker, actor in self._actors.items()}
            return self.gather(COMPILED_TIMES, calls, skips_lost=True)
        finally:
            self.detector.are_loading = False

    def choose_computation(self, *, is_compiled: bool) -> None:
        """Let all members compute with compiled or eager code, also those that start later.

        Members that die during the call are left out.

        Raises:
            MembersLost: all members died.
        """
        self.compiles = is_compiled
        calls = {
            worker: actor.choose_computation.remote(is_compiled) for worker, actor in self._actors.items()
        }
        self.gather(NOTHING, calls, skips_lost=True)

    @property
    def beginning(self) -> Sources | None:
        """Sources of the weights in the checkpoint or the pretrained model; None if weights come from the seed."""
        return Sources((server_source(self._shard_store),)) if self._facts.has_weights else None

    def source(self, worker: Worker, copy: ShardPart | None = None) -> Source:
        """Return a source that reads from a member.

        Args:
            worker: the member.
            copy: layers and share of the backup copy to read; None reads the member's own shard.
        """
        return Source(self._actors[worker], self.name(worker), worker, copy)

    def invite(self, shards: Mapping[Worker, Shard], topology: Topology) -> None:
        """Start members that do not run yet, and admit started members that are ready. Never wait.

        Before a member is admitted, it imports torch and builds its shard, which is slow. A member that fails to do
        so is killed. From then on, `has_refused` returns True for its machine and Ray node.

        Args:
            shards: the shard of each member.
            topology: the machines that members may run on; replaces the previous machines (see `offer`).
        """
        self.offer(topology)
        for worker in sorted(shards.keys() - self._invited.keys() - self._actors.keys()):
            actor = self._start(worker, applied=-1)
            self._invited[worker] = actor, actor.build.remote(shards[worker])
        refs = {ref: worker for worker, (_, ref) in self._invited.items()}
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=0)[0] if refs else ():
            worker = refs[ref]
            actor, _ = self._invited.pop(worker)
            if self.detector.accepts_heartbeat(worker, ref):
                self._actors[worker] = actor
            else:
                self._refused.add((worker, self.topology[worker].node_id))
                ray.kill(actor)

    def withdraw(self, but: Collection[Worker]) -> None:
        """Kill the members that `invite` started but has not admitted, except those in `but`."""
        for worker in self._invited.keys() - set(but):
            actor, _ = self._invited.pop(worker)
            ray.kill(actor)

    def has_refused(self, machine: Contributor) -> bool:
        """Return whether `invite` failed to start a member on this machine with its current Ray node."""
        return (machine.id, machine.node_id) in self._refused

    def statuses(self) -> dict[Worker, MemberStatus]:
        """Ask all members for a heartbeat now, and return the answers; none if all died or the job was cancelled.

        Losses are not reported again, so call this only when no step follows; before that, use `ask_statuses`.
        """
        try:
            return self.gather(STATUS, self._status_calls(), skips_lost=True)
        except (MembersLost, Cancelled):
            return {}

    def ask_statuses(self) -> dict[Worker, MemberStatus]:
        """Ask all members for a heartbeat now; raise the errors of `gather`, such as `MembersLost`."""
        return self.gather(STATUS, self._status_calls())

    def _status_calls(self) -> dict[Worker, Any]:
        return {worker: actor.status.remote() for worker, actor in self._actors.items()}

    def query_caught_up(self, followers: Collection[Worker]) -> dict[Any, Worker]:
        """Ask catch-up replicas whether they have caught up; return the called member by pending call."""
        return {self._actors[worker].is_up_to_date.remote(): worker for worker in followers}

    def query_whole_copies(self, holders: Collection[Worker]) -> dict[Any, Worker]:
        """Ask members whether their backup copies are complete; return the called member by pending call."""
        return {self._actors[worker].has_whole_copies.remote(): worker for worker in holders}

    def have_whole_copies(self, holders: Collection[Worker]) -> bool:
        """Ask members whether their backup copies are complete; wait for all answers, and return whether all are yes.

        Raises:
            MembersLost: members died during the call.
        """
        return all(self.ask(FLAG, set(holders), "has_whole_copies").values())

    def is_affirmed(self, worker: Worker, ref: Any) -> bool:
        """Return whether a member answered True to a call of `query_caught_up` or `query_whole_copies`."""
        try:
            return answered(FLAG, ref, self.name(worker))
        except (Undeclared, RayError) as failure:
            if isinstance(failure, Undeclared) or is_refusal(failure):
                self.detector.accuse(worker, failure)
            return False  # the failure detector reports a dead member

    def inventory(self, holders: Sequence[Source]) -> Sources:
        """Return sources in which each tensor comes from the first of the holders that has the tensor.

        Raises:
            MembersLost: members died during the call.
            StaleEpoch: one of the holders died during the call.
        """
        refs = [holder.ask("inventory") for holder in holders]
        self.wait(refs)
        try:
            names = [self._inventory(holder, ref) for holder, ref in zip(holders, refs, strict=True)]
        except (RayActorError, ObjectLostError) as failure:
            raise StaleEpoch(
                "a member that held a part of the model died", hint="no action needed: the next epoch begins"
            ) from failure
        places = {name: place for place, known in reversed(list(enumerate(names))) for name in known}
        return Sources(tuple(holders), places)

    def _inventory(self, holder: Source, ref: Any) -> tuple[str, ...]:
        try:
            return answered(NAMES, ref, holder.name)
        except (Undeclared, RayError) as failure:
            if holder.worker is None or not (isinstance(failure, Undeclared) or is_refusal(failure)):
                raise
            self.detector.accuse(holder.worker, failure)
            raise MembersLost(self.check_members()) from failure

    def load_shards(
        self,
        shards: Mapping[Worker, Shard],
        shares: Mapping[Worker, OptimizerShare],
        sources: Callable[[Worker], Sources | None],
        applied: int,
    ) -> None:
        """Have halted members load other shards; members keep their current shards until `adopt`.

        Args:
            shards: the shard to load, by member.
            shares: the share of the optimizer's state to load, by member.
            sources: returns the sources that a member loads from; None to initialize weights from the seed.
            applied: last step whose update is in the weights.

        Raises:
            StaleEpoch: a member that is a source of weights died during the call.
            MembersLost: members died during the call.
            PlanInfeasible: a shard does not fit into its machine's memory, contrary to the plan's estimate.
            WrongTensor: a member that is a source of weights sent data that does not fit the shard.
        """
        self.detector.are_loading = True
        try:
            self.gather(
                COUNT,
                {
                    worker: self._actors[worker].load.remote(
                        self._shard_store, shard, sources(worker), applied, shares[worker]
                    )
                    for worker, shard in shards.items()
                },
            )
        finally:
            self.detector.are_loading = False

    def adopt(self, workers: Collection[Worker], epoch: int, applied: int) -> None:
        """Have members switch to the shards that they loaded.

        Args:
            workers: the members.
            epoch: number of the epoch that is about to begin.
            applied: last step whose update is in the weights.

        Raises:
            MembersLost: members died during the call.
        """
        self.ask(NOTHING, workers, "adopt", epoch, applied)

    def dismiss(self) -> None:
        """Kill all members, including members that are not admitted yet."""
        for actor, _ in self._invited.values():
            ray.kill(actor)
        self._invited.clear()
        self.remove(tuple(self._actors))

    def repeated_messages(self) -> Iterator[tuple[Worker, bytes, bytes]]:
        """Yield (sender, key, message) for each message that a new heartbeat repeats.

        Members repeat messages that were not acknowledged in time.
        """
        for worker, sign in self.detector.take_new_heartbeats().items():
            for key, message in sign.unacknowledged:
                yield worker, key, message

    def send(self, worker: Worker, message: ToMember) -> None:
        """Send a message to a member without waiting for an answer; do nothing if the member is gone."""
        actor = self._actors.get(worker)
        if actor is not None:
            actor.receive.remote(message)


class Poll:
    """Repeats a yes-or-no question to members until all answer yes. Never waits for the answers.

    Args:
        group: the members.
    """

    def __init__(self, group: TrainingGroup) -> None:
        self._group = group
        self._pending: dict[Any, Worker] = {}
        """Called member, by call that has no answer yet."""

    def is_unanimous(self, ask: Callable[[], dict[Any, Worker]]) -> bool:
        """Return whether all members have answered yes; start new calls if none is pending.

        Args:
            ask: starts the calls; see `TrainingGroup.query_caught_up`.
        """
        if not self._pending:
            self._pending = ask()
        ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        if len(ready) < len(self._pending):
            return False
        ref, self._pending = self._pending, {}
        return all(self._group.is_affirmed(worker, ref) for ref, worker in ref.items())
