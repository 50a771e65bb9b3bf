"""The simulated world: machines, coordinators, the step log and the network, driven by one clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random

from tests.simulated_world.checks import Checks
from tests.simulated_world.host import Host
from tests.simulated_world.network import Clock, Network
from tests.simulated_world.planner import Planner
from tests.simulated_world.process import Process
from tests.simulated_world.record import DurableRecord
from tests.simulated_world.reductions import Exchange, Reduction
from tests.simulated_world.scenario import Scenario, Upset, UpsetKind
from tests.simulated_world.seat import Seat
from tests.simulated_world.symbols import Reference, SymbolicModel

from share_compute.errors import VerificationFailed
from share_compute.protocol.coordinator import (
    Assemble,
    Blame,
    Committed,
    Continue,
    CoordinatorMachine,
    Disputed,
    Diverged,
    Lost,
    Recorded,
    Superseded,
    Suspect,
    Tick,
    WriteStepLog,
)
from share_compute.protocol.doubts import quarantines
from share_compute.protocol.failures import FailureScript, InjectedFailure
from share_compute.protocol.member import MemberMachine
from share_compute.protocol.member_events import Reduce, RetransmissionTimeout
from share_compute.protocol.membership import Membership, Worker
from share_compute.protocol.messages import Prepared
from share_compute.protocol.points import Point
from share_compute.protocol.tree import SummationTree

TICK_S = 3.0
MEMBER_TICK_S = 9.0
WATCH_S = 4.0
PATIENCE_TICKS = 8
ENDS_WITHIN_S = 2000.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run that passed all checks; a run that fails one raises.

    Args:
        epochs: number of recorded epochs.
        duration_s: simulated time in seconds.
        messages: number of messages sent.
        cells: number of cells and updates computed.
        passed: number of times that each point was passed.
        unmet: failures whose point was never passed.
        blamed: number of times that each machine was blamed for wrong numbers.
        verdict: reason for which the job was given up; None if it reached its end.
    """

    epochs: int
    duration_s: float
    messages: int
    cells: int
    passed: Mapping[Point, int]
    unmet: tuple[InjectedFailure, ...]
    blamed: Mapping[Worker, int]
    verdict: Diverged | Disputed | None


class World:
    """One run of a scenario.

    Args:
        scenario: size, network and failures of the run.
        new_member: function that makes a member's state machine from its name and its last applied step.
        new_coordinator: class of a coordinator's state machine, called as `CoordinatorMachine` is.
        tick_s: approximate interval in seconds at which coordinators look for missing answers.
    """

    def __init__(
        self,
        scenario: Scenario,
        new_member: Callable[[Worker, int], MemberMachine] = MemberMachine,
        new_coordinator: type[CoordinatorMachine] = CoordinatorMachine,
        tick_s: float = TICK_S,
    ) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.random = Random(scenario.seed)
        self.network = Network(self.clock, scenario.weather, self.random)
        self.record = DurableRecord()
        self.model = SymbolicModel(
            scenario.layers, SummationTree(scenario.runs), scenario.is_tied, scenario.diverges_at
        )
        self.checks = Checks(self.model, Reference.of(self.model, scenario.steps), self.record)
        self.planner = Planner(self, scenario.stages, shares_optimizer=scenario.shares_optimizer)
        self.leaving: set[Worker] = set()
        self.culprits: set[Worker] = set()
        """Machines at which the script injected wrong numbers or false accusations."""
        self.blamed: Counter[Worker] = Counter()
        self._accusers: defaultdict[Worker, list[Worker | None]] = defaultdict(list)
        """Accuser of each blame, by machine that was blamed."""
        self._believed: dict[tuple[str, Worker], Worker] = {}
        """Machine that was excluded on an accuser's word, by coordinator and accuser."""
        self.banned: set[Worker] = set()
        """Machines that are quarantined."""
        self.verdict: Diverged | Disputed | None = None
        """Reason for which a coordinator gave the job up; None before that."""
        self.hosts: dict[Worker, Host] = {}
        """Current host of every machine. A dead host stays until another host of the name starts."""
        self.seats: list[Seat] = []
        """All coordinators so far, the newest last."""
        self._new_member = new_member
        self._new_coordinator = new_coordinator
        self._script = FailureScript(scenario.failures)
        self._reductions: dict[tuple[int, int, int], Reduction] = {}
        self._exchanges: dict[tuple[int, int, int], Exchange] = {}
        self._known: dict[str, dict[Worker, Host]] = {}
        """Machines that a coordinator was notified of, as they were then, by coordinator."""
        self._prepared: defaultdict[tuple[int, int], set[Worker]] = defaultdict(set)
        self._committable = 0, 0
        """Last step that all members of an epoch were prepared for, and its generation."""
        self._passed: Counter[Point] = Counter()
        self._cells = 0
        self._is_over = False
        self._tick_s = tick_s

    # -- running -----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run the job to its end.

        Raises:
            VerificationFailed: something was lost, duplicated or wrong, or the job does not end.
        """
        late = set(self.scenario.workers[self.scenario.machines - self.scenario.late :])
        for worker in self.scenario.workers:
            self.hosts[worker] = Host(worker, self, self._new_member(worker, -1))
            if worker in late:
                self.hosts[worker].is_alive = False
                self.clock.after(30.0 * self.random.random(), partial(self._start_host, worker))
        for upset in self.scenario.upsets:
            self.clock.after(upset.time_s, partial(self._upset, upset))
        self._every(self._tick_s, self._tick)
        self._every(MEMBER_TICK_S, self._tick_members)
        self._every(WATCH_S, self._watch)
        self._start_seat()
        while not self._is_over and self.verdict is None:
            self.clock.advance()
            if self.clock.now_s > ENDS_WITHIN_S:
                raise VerificationFailed(
                    f"at step {self.record.committed} of {self.scenario.steps} after {ENDS_WITHIN_S} s",
                    hint="find who waits for whom",
                )
        if self.verdict is None:
            self._end()
        return Outcome(
            epochs=self.record.epoch,
            duration_s=self.clock.now_s,
            messages=self.network.messages,
            cells=self._cells,
            passed=dict(self._passed),
            unmet=self._script.waiting,
            blamed=dict(self.blamed),
            verdict=self.verdict,
        )

    def _end(self) -> None:
        """Continue until replaced coordinators notice that they were replaced."""
        while len(self._sitting()) > 1 and self.clock.now_s < ENDS_WITHIN_S:
            self.clock.advance()
        if len(self._sitting()) > 1 or self.record.committed != self.scenario.steps:
            raise VerificationFailed("two coordinators are left", hint="refuse writes of older epochs")

    def _every(self, period_s: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.clock.after(period_s * (0.5 + self.random.random()), again)

        self.clock.after(period_s * self.random.random(), again)

    def _tick(self) -> None:
        for seat in self._sitting():
            seat.order(Tick())

    def _tick_members(self) -> None:
        for host in self.hosts.values():
            if host.is_alive:
                host.receive_event(RetransmissionTimeout())

    # -- requests of processes ---------------------------------------------------------------------------------------

    def passes(self, point: Point, worker: Worker | None, step: int) -> list[InjectedFailure]:
        """Return the failures that the script injects now."""
        self._passed[point] += 1
        return self._script.passes(point, worker, step)

    def may_die(self, process: Process) -> bool:
        """Return whether the state of the job survives without this process."""
        if not isinstance(process, Host):
            return True
        committed = self.record.committed
        latest, generation = max((committed, self.record.generation), self._committable)
        if latest == 0:
            return True
        found: set[int] = set()
        for host in self.hosts.values():
            if host is process or not host.is_alive:
                continue
            has_all = host.machine.applied == latest
            is_complete = host.machine.is_complete and host.machine.generation == generation
            if has_all or (host.machine.applied == latest - 1 and is_complete):
                found |= host.lasting_layers
            # A scale that no host was notified of yet comes with the plan.
            scales = {committed: 0.0, latest: 0.0, **host.scales}
            for vault in host.vaults.values():
                if vault.reaches(latest, scales):
                    found |= vault.weights.keys()
        return len(found) == self.model.layers

    def on_death(self, process: Process) -> None:
        """Note that a process is gone. Another process takes its place some time later."""
        delay_s = 5.0 + 20.0 * self.random.random()
        if isinstance(process, Host):
            self.leave_reductions(process.worker)
            self.clock.after(delay_s, lambda: self._start_host(process.worker))
        else:
            self.clock.after(delay_s, self._start_seat_if_none)

    def compute_s(self) -> float:
        """Return the duration of a cell or an update, in seconds."""
        self._cells += 1
        return 0.2 + 0.8 * self.random.random()

    def reduction(self, membership: Membership, stage: int, reduce: Reduce) -> Reduction:
        """Return the reduction of a stage, the same for all of its members."""
        key = (membership.epoch, stage, reduce.step)
        if key not in self._reductions:
            self._reductions[key] = Reduction(
                membership.stages[stage], reduce.source, self.model, self.clock, self.random
            )
        return self._reductions[key]

    def exchange(self, membership: Membership, stage: int, step: int) -> Exchange:
        """Return the exchange of weights of a stage after a step, the same for all of its members."""
        key = (membership.epoch, stage, step)
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(membership.stages[stage], self.clock, self.random)
        return self._exchanges[key]

    def leave_reductions(self, worker: Worker) -> None:
        """End the collective operations of a member that died or was halted; they may fail."""
        for reduction in self._reductions.values():
            reduction.leave(worker)
        for exchange in self._exchanges.values():
            exchange.leave(worker)

    def write(self, record: WriteStepLog) -> Recorded | Superseded:
        """Write what a coordinator asks for to the step log, unless the coordinator was replaced."""
        return self.record.write(record)

    def on_prepared(self, membership: Membership, prepared: Prepared) -> None:
        """Note that a member is prepared. From the last one on, the step may be recorded, even if any machine dies."""
        workers = self._prepared[membership.epoch, prepared.step]
        workers.add(prepared.worker)
        if workers >= set(membership.workers):
            generation = self.hosts[prepared.worker].machine.generation
            self._committable = max(self._committable, (prepared.step, generation))

    def on_committed(self, seat: Seat, committed: Committed) -> None:
        """Check a step that a coordinator reports as committed, and end machines that have left."""
        if committed.step > self.record.committed:
            raise VerificationFailed(f"{seat.name} tells of {committed.step}", hint="record it first")
        for worker in sorted(self.leaving - seat.machine.workers):
            host = self.hosts[worker]
            if host.is_alive and seat is self._seat and self.may_die(host):
                self.leaving.discard(worker)
                host.kill()

    def on_blamed(self, seat: Seat, blame: Blame) -> None:
        """Check that a blamed machine, or its accuser, is at fault, and count the blame."""
        hint = "find the machine whose numbers are wrong"
        if self.culprits.isdisjoint({blame.worker, blame.accuser}):
            raise VerificationFailed(f"{blame.worker} is blamed: {blame.what}", hint=hint)
        earlier = self._accusers[blame.worker]
        if blame.is_grave or quarantines(blame.accuser, earlier):
            self.banned.add(blame.worker)
        if not self.banned <= self.culprits:
            raise VerificationFailed(f"{blame.worker} is quarantined: {blame.what}", hint=hint)
        self.on_believed(seat, blame)
        earlier.append(blame.accuser)
        self.blamed[blame.worker] += 1

    def on_believed(self, seat: Seat, effect: Suspect | Blame) -> None:
        """Check that a coordinator takes the word of each member only once when it leaves a machine out."""
        if effect.accuser is not None:
            loser = self._believed.setdefault((seat.name, effect.accuser), effect.worker)
            if loser != effect.worker:
                raise VerificationFailed(f"{effect.accuser} is believed again", hint="take its word once")

    def on_expelled(self, seat: Seat, worker: Worker) -> None:
        """End a member that a coordinator expels: its numbers are wrong, or its word was taken before."""
        if not self.blamed[worker] and (seat.name, worker) not in self._believed:
            raise VerificationFailed(f"{worker} is expelled", hint="expel those whose numbers are wrong")
        self._known[seat.name].pop(worker, None)
        host = self.hosts[worker]
        if host.is_alive and self.may_die(host):
            host.kill()

    def on_hopeless(self, verdict: Diverged | Disputed) -> None:
        """Note that a coordinator gives the job up, after a check of the reason."""
        is_wrong = isinstance(verdict, Diverged) and self.model.diverges_at is None and not verdict.is_alone
        if is_wrong:
            raise VerificationFailed(f"{verdict} of a sound model", hint="find the machine to blame")
        self.verdict = verdict

    def on_pause(self, seat: Seat, step: int) -> None:
        """Check all members that pause, according to a coordinator; then ask for more steps or end the run."""
        if seat is not self._seat:
            return
        for worker in seat.machine.workers:
            host = self.hosts[worker]
            # If this coordinator was replaced and does not know it, members are in another epoch.
            if host.machine.epoch == seat.machine.epoch == self.record.epoch:
                self.checks.at_pause(host, step)
        if step >= self.scenario.steps:
            self._is_over = True
            return
        until = min(pause for pause in self.scenario.pauses if pause > step)
        self.clock.after(3.0 * self.random.random(), lambda: seat.order(Continue(until)))

    # -- events of the world -----------------------------------------------------------------------------------------

    def _sitting(self) -> list[Seat]:
        return [seat for seat in self.seats if not seat.is_over]

    @property
    def _seat(self) -> Seat | None:
        """The newest coordinator that is not over."""
        return next(reversed(self._sitting()), None)

    def _start_host(self, worker: Worker) -> None:
        if not self.hosts[worker].is_alive:
            self.leaving.discard(worker)
            self.hosts[worker] = Host(worker, self, self._new_member(worker, -1))

    def _start_seat_if_none(self) -> None:
        if not self._sitting():
            self._start_seat()

    def _start_seat(self) -> None:
        """Start a coordinator that takes over from the step log."""
        machine = self._new_coordinator(
            self.record.epoch, self.record.committed, self.model.decide, PATIENCE_TICKS
        )
        seat = Seat(f"coordinator {len(self.seats)}", self, machine)
        self.seats.append(seat)
        self._known[seat.name] = {}
        later = [pause for pause in self.scenario.pauses if pause > self.record.committed]
        seat.order(Continue(min(later, default=self.scenario.steps)))

    def _upset(self, upset: Upset) -> None:
        host, seat = self.hosts[upset.worker], self._seat
        if upset.kind is UpsetKind.rival or seat is None:
            self._start_seat()
            return
        match upset.kind:
            case UpsetKind.kill if host.is_alive and self.may_die(host):
                host.kill()
            case UpsetKind.stop if host.is_alive:
                host.stop(upset.amount)
            case UpsetKind.suspect:
                self._known[seat.name].pop(upset.worker, None)
                seat.order(Lost(upset.worker))
            case UpsetKind.drain if host.is_alive and len(seat.machine.workers) > 1:
                self.leaving.add(upset.worker)
                self._assemble(seat, seat.machine.workers)
            case UpsetKind.stages:
                self.planner.stages = upset.amount
                self._assemble(seat, seat.machine.workers)
            case UpsetKind.kill_coordinator:
                seat.kill()
            case _:
                pass  # there is no process that it could happen to

    def _assemble(self, seat: Seat, workers: set[Worker]) -> None:
        for worker in workers:
            self._known[seat.name].setdefault(worker, self.hosts[worker])
        seat.order(Assemble(frozenset(workers), waits=self.random.random() < 0.5))

    def _watch(self) -> None:
        """Notify each coordinator of the machines that are lost and of those that are present."""
        for seat in self._sitting():
            if seat.is_stopped:
                continue
            if self._is_over and seat is not self._seat:
                self._assemble(seat, set(self.hosts))
            if seat.machine.phase == "paused":  # a rival existed when it paused, and is dead by now
                seat.order(Continue(seat.machine.until))
            there = {worker for worker, host in self.hosts.items() if self._is_there(seat, host)}
            known = self._known[seat.name]
            gone = {
                worker
                for worker, host in known.items()
                if worker not in there or host is not self.hosts[worker]
            }
            for worker in sorted(gone):
                del known[worker]
                seat.order(Lost(worker))
            news = there - known.keys()
            if news or (seat.machine.phase == "idle" and there):
                self._assemble(seat, (known.keys() & there) | news)
        if not self._sitting():
            self._start_seat()

    def _is_there(self, seat: Seat, host: Host) -> bool:
        is_cut = self.network.is_cut(seat.name, host.name)
        return host.is_alive and not host.is_stopped and not is_cut
