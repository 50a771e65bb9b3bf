"""Compare predicted and measured step times of several plans on three real, unequal contributors.

The contributors are three raylets on this machine. A control group limits each to a part of a processor, and relays
delay and throttle their links. The product's own probe measures them. The first steps of the first plan, an even
split, correct the cost model as the profiler does in a job. Every other plan is predicted before it runs. This needs
root, for the control groups.

Stages have one member each, because the relays do not cover the path of gradient sums.
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple, cast

from _harness import arguments, job, lead, print_figure, start_cluster
from _unequal import Relays, Road, inside, processor_share
from numpy.typing import NDArray
from pydantic import TypeAdapter

from share_compute.lifecycle.attempt_events import Assignment
from share_compute.models.factory import dissect
from share_compute.planning.cost.timings import LayerTiming
from share_compute.planning.planner import Solution, solve
from share_compute.specification import TrainJob
from share_compute.topology import Contributor, Device, Link, Topology
from share_compute_actors.machine.probe_links import measure_link
from share_compute_actors.messages import StepFigures
from share_compute_actors.training.membership.training_group import TrainingGroup
from share_compute_actors.transport.keys import Peer
from share_compute_actors.wire import TEXT, unpack_answer

CORES = (0.6, 0.45, 0.3)
"""Processor cores of each contributor; on two cores their sum leaves room for all other processes."""
NEAR, FAR = (0.001, 200e6), (0.010, 20e6)
"""Latency in seconds and bytes/s: between the first two contributors, and to the third."""
MEMORY_BYTES = 4 * 2**30
ERROR_GOAL, CHOICE_GOAL = 0.15, 0.05
_SETTLING_STEPS = 4
"""Number of steps that are not measured: the first one is warm-up, the next ones run the profiler."""
_DEVICES: TypeAdapter[tuple[Device, ...]] = TypeAdapter(tuple[Device, ...])


class Case(NamedTuple):
    """A plan to predict and to run."""

    name: str
    machines: tuple[int, ...]
    parallelism: dict[str, Any]


CASES = (
    Case("even split", (0, 1, 2), {"strategy": "uniform", "stages": 3}),
    Case("by speed", (0, 1, 2), {"strategy": "compute_weighted", "stages": 3}),
    Case("fastest alone", (0,), {"stages": 1}),
    Case("second alone", (1,), {"stages": 1}),
    Case("two near ones", (0, 1), {"stages": 2}),
    Case("two far ones", (0, 2), {"stages": 2}),
    Case("the planner's choice", (0, 1, 2), {}),
)


def road(source: int, target: int) -> tuple[float, float]:
    """Return latency and bytes/s from one contributor to another."""
    return FAR if 2 in (source, target) else NEAR


class RelayedGroup(TrainingGroup):
    """Worker group whose members reach each other through relays."""

    relays: Relays | None = None

    def ask(self, schema: Any, workers: Collection[str], method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of some members; addresses of peers in the arguments are replaced by those of relays."""
        if method != "connect":
            return super().ask(schema, workers, method, *arguments)
        peers, dead = arguments
        seen = self._over_relays(peers)
        return self.gather(
            schema, {worker: self.handle(worker).connect.remote(seen[worker], dead) for worker in workers}
        )

    def _over_relays(self, peers: Sequence[Peer]) -> dict[str, list[Peer]]:
        """Open a relay for each ordered pair of members; return for each member the peers at their relay addresses."""
        places = {peer.worker: int(peer.name.rpartition("-")[2]) for peer in peers}
        ways = list(permutations(peers, 2))
        roads = []
        for source, target in ways:
            host, _, port = target.endpoint.removeprefix("tcp://").rpartition(":")
            roads.append(Road(host, int(port), *road(places[source.worker], places[target.worker])))
        self.relays = Relays(roads) if roads else None
        begins = dict(zip(ways, self.relays.ports, strict=True)) if self.relays else {}

        def seen_from(source: Peer, target: Peer) -> Peer:
            if source == target:
                return target
            return replace(target, endpoint=f"tcp://127.0.0.1:{begins[source, target]}")

        return {source.worker: [seen_from(source, target) for target in peers] for source in peers}

    def dismiss(self) -> None:
        """End members and relays."""
        super().dismiss()
        if self.relays is not None:
            self.relays.close()


@contextmanager
def echo_server() -> Iterator[int]:
    """Run a server that answers every payload (with an 8-byte length prefix) with one byte; yield its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # the listener is closed: the measurement is over
            with connection, connection.makefile("rb") as stream:
                while head := stream.read(8):
                    stream.read(int.from_bytes(head))
                    connection.sendall(b"x")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def measure_links(ids: list[str]) -> Iterator[Link]:
    """Measure all links as contributors do, through the relays."""
    with echo_server() as port:
        ways = list(permutations(range(len(ids)), 2))
        relays = Relays([Road("127.0.0.1", port, *road(*way)) for way in ways])
        for (source, target), begin in zip(ways, relays.ports, strict=True):
            with socket.create_connection(("127.0.0.1", begin)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield measure_link(ids[source], ids[target], partial(_echo, connection))
        relays.close()


def _echo(connection: socket.socket, payload: NDArray[Any]) -> None:
    connection.sendall(payload.nbytes.to_bytes(8) + payload.tobytes())
    connection.recv(1)


def probe(node_ids: list[str]) -> Topology:
    """Return the topology of these nodes as the product's probe measures it."""
    import ray

    from share_compute_actors.machine.contributor import start_contributor

    machines = []
    for place, node in enumerate(node_ids):
        actor = start_contributor(f"c{place}", node)
        ref = actor.probe.remote(memory_bytes=MEMORY_BYTES, cpu_threads=1, device="cpu")
        text = unpack_answer(TEXT, ray.get(ref), "a machine")
        ray.kill(actor)
        machines.append(
            Contributor(
                f"c{place}", f"machine-{place}", _DEVICES.validate_json(text), 1, node, f"127.0.0.{place + 1}"
            )
        )
    return Topology(tuple(machines), tuple(measure_links([machine.id for machine in machines])))


@dataclass
class Run:
    """Measurements of one plan."""

    seconds: list[float] = field(default_factory=list)
    timings: dict[str, dict[int, LayerTiming]] = field(default_factory=dict)


class Bench:
    """One shard store, and new members for each plan."""

    def __init__(self, spec: TrainJob, topology: Topology, folder: Path) -> None:

        from share_compute_actors.group.answering import ask_shard_store
        from share_compute_actors.training.shard_store import FACTS, ShardStore

        self.spec, self.topology = spec, topology
        self._assignment = Assignment(
            job_id="reality", attempt=1, spec=spec, topology=topology, folder=folder
        )
        self._shard_store = cast("Any", ShardStore).remote(self._assignment.model_dump_json())
        self._facts = ask_shard_store(FACTS, self._shard_store.prepare.remote())
        self.profile = dissect(self._facts.blueprint)

    def plan(self, case: Case, timings: dict[str, dict[int, LayerTiming]]) -> Solution:
        """Return the planner's plan for a case."""
        spec = self._spec(case)
        chosen = {f"c{place}" for place in case.machines}
        topology = Topology(
            tuple(machine for machine in self.topology.contributors if machine.id in chosen),
            tuple(link for link in self.topology.links if {link.source, link.target} <= chosen),
        )
        return solve(spec, topology, self.profile, 0, timings)

    def _spec(self, case: Case) -> TrainJob:
        parallelism = self.spec.parallelism.model_copy(update={"members_per_stage": 1, **case.parallelism})
        return self.spec.model_copy(update={"parallelism": parallelism})

    def run(self, solution: Solution, steps: int) -> Run:
        """Run a plan and return its measurements."""
        done = Run()

        def observe(step: int, seconds: float, results: Mapping[str, StepFigures]) -> None:
            if step > _SETTLING_STEPS:
                done.seconds.append(seconds)
            for worker, result in results.items():
                if result.layer_timings:
                    done.timings[worker] = dict(result.layer_timings)

        led = lead(
            self._assignment,
            solution,
            self._facts,
            self._shard_store,
            lambda _event: None,
            observe,
            RelayedGroup,
        )
        try:
            led.conductor.steps(_SETTLING_STEPS + steps)
        finally:
            led.end()
        return done


def main() -> None:
    """Print one line for each plan, and one for all plans."""
    options = arguments(__doc__ or "")
    steps = 3 if options.quick else options.steps
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        groups = [
            stack.enter_context(processor_share(f"{place}", cores)) for place, cores in enumerate(CORES)
        ]
        local = stack.enter_context(start_cluster())
        nodes = []
        for group in groups:
            with inside(group):
                nodes.append(local.add_node(num_cpus=1, object_store_memory=80 * 2**20).node_id)
        spec = job(folder, steps=_SETTLING_STEPS + steps, channel="direct", backups=False)
        training = spec.training.model_copy(update={"batch_size": 8, "microbatches": 4})
        bench = Bench(spec.model_copy(update={"training": training}), probe(nodes), folder)
        compare(bench, steps)


def compare(bench: Bench, steps: int) -> None:
    """Run all cases and print the errors of the predictions."""
    first = bench.plan(CASES[0], {})
    timings = bench.run(first, steps).timings
    errors: list[float] = []
    measured: dict[str, float] = {}
    for case in CASES:
        raw, solution = bench.plan(case, {}).plan, bench.plan(case, timings)
        plan = solution.plan
        assert plan.prediction is not None
        assert raw.prediction is not None
        seconds = statistics.median(bench.run(solution, steps).seconds)
        measured[case.name] = seconds
        errors.append(abs(plan.prediction.step_s / seconds - 1))
        print_figure(
            "predicted_vs_measured_plan",
            ours=plan.prediction.step_s,
            peer=seconds,
            peer_name="measured",
            ratio=plan.prediction.step_s / seconds,
            unit="s/step",
            plan=case.name,
            layers={
                member.name: f"{stage.start}-{stage.stop - 1}"
                for stage in plan.stages
                for member in stage.members
            },
            before_correction=raw.prediction.step_s,
        )
    choice, fastest = measured[CASES[-1].name], min(measured.values())
    print_figure(
        "predicted_vs_measured",
        ours=max(errors),
        peer=ERROR_GOAL,
        peer_name="goal: worst error",
        ratio=ERROR_GOAL / max(errors),
        unit="share of the measured step time",
        plans=len(errors),
        mean_error=statistics.mean(errors),
        choice_over_fastest=choice / fastest,
        choice_goal=1 + CHOICE_GOAL,
    )


if __name__ == "__main__":
    main()
