"""Dry runs over REST, on given and on live machines; the live topology as a document."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import random
from typing import Any

import httpx
import pytest
from tests.api.conftest import wait_until

from share_compute import __version__
from share_compute.errors import NotAuthorized, PlanInfeasible, Unavailable, UserError, VerificationFailed
from share_compute.files.topology_file import TopologyDocument, parse_topology
from share_compute.lifecycle.attempt_events import Planned
from share_compute.planning.plan import NOT_MEASURED, Plan
from share_compute.planning.plan_file import pinned_plan
from share_compute.planning.report import PlanReport, PlanTimeline
from share_compute.planning.serving.cost import PROCESS_BYTES
from share_compute.specification import parse_job
from share_compute.topology import HEAD, Device, Link
from share_compute_api.client.client import Client
from share_compute_api.control.machines.live_topology import live_topology, require_sound, sound_links
from share_compute_api.schemas.bodies import PlanRequest, ServingRequest
from share_compute_api.workers.plan_process import PlanProcesses
from share_compute_api.workers.planning import plan_on_paper

FAST = Device("cpu", "fast", 8 * 2**30, {"float32": 4e11}, 4e10)


def machines(count: int = 2, memory_bytes: int = 8 * 2**30, bytes_per_s: float = 1e9) -> dict[str, Any]:
    """Return a topology of equal machines in a row."""
    return {
        "kind": "topology",
        "version": 1,
        "contributors": [
            {
                "name": f"machine-{number}",
                "devices": [{"memory_bytes": memory_bytes, "flops_per_s": {"float32": 2e11}}],
            }
            for number in range(count)
        ],
        "links": [
            {
                "source": f"machine-{number}",
                "target": f"machine-{number + 1}",
                "latency_s": 1e-4,
                "bytes_per_s": bytes_per_s,
            }
            for number in range(count - 1)
        ],
    }


def llama(**training: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return {
        "name": "llama",
        "model": {"config": config},
        "data": {"files": ["/nobody/looks/at/it.txt"]},
        "training": {"batch_size": 32, "microbatches": 16, "sequence_length": 512, **training},
    }


def arrive(plane: Any, name: str, device: Device = FAST, links: Sequence[Link] = (), **labels: str) -> str:
    """Let a measured machine join."""
    _, code = plane.store.invites.create()
    limits = {"cpu_threads": 4, "labels": labels}
    record, _ = plane.store.contributors.join(code, name=name, host=name, versions={}, limits=limits)
    plane.store.contributors.online(record.id, node_id="ab", address=f"192.0.2.{len(name)}")
    plane.store.contributors.ready(record.id, capacity=[device], links=links)
    return str(record.id)


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["code"] == code
    assert document["hint"]
    return document


@pytest.mark.slow
def test_a_dry_run_on_paper(client: Client) -> None:
    report = client.plan(
        llama(), topology=TopologyDocument.model_validate(machines()), compare=True, serving=ServingRequest()
    )
    assert report.plan.num_layers == 8
    assert report.plan.stages[0].start == 0
    assert report.plan.stages[-1].stop == 8
    prediction = report.plan.prediction
    assert prediction is not None
    assert 0 < prediction.lower_bound_s <= prediction.step_s
    assert report.timeline[-1].stop_s <= prediction.step_s * 1.01
    assert {"uniform", "auto"} <= {row.strategy for row in report.alternatives} | {report.plan.strategy}
    assert report.serving is not None
    assert report.serving.first_token_s > report.serving.next_token_s > 0
    assert client.jobs().jobs == [], "nothing is queued"


@pytest.mark.slow
def test_a_dry_run_on_the_live_machines(plane: Any, client: Client) -> None:
    ada = arrive(plane, "ada")
    arrive(plane, "grace", links=[Link("grace", HEAD, 1e-3, 1e8), Link("x", ada, 1e-3, 1e8)])
    report = client.plan(llama(), strategy="uniform")
    names = {member.name for stage in report.plan.stages for member in stage.members}
    assert names == {"ada", "grace"}
    assert report.plan.strategy == "uniform"


@pytest.mark.slow
def test_a_pinned_plan_is_submitted_as_content(plane: Any, http: httpx.Client, client: Client) -> None:
    arrive(plane, "ada")
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 64}} for _ in range(2)]
    job: dict[str, Any] = {"model": {"layers": layers}, "data": {"dataset": "digits"}}
    refused = problem(
        http.post("/jobs", json={**job, "parallelism": {"plan": "plan.yaml"}}), 422, "invalid-request"
    )
    assert "parallelism.plan: names a file" in refused["detail"]
    assert refused["details"]["fields"][0]["field"] == "parallelism.plan"
    plan = pinned_plan(client.plan(job).plan).model_dump(mode="json")
    pinned = client.plan({**job, "parallelism": {"plan": plan}}).plan
    assert (pinned.strategy, [member.name for member in pinned.stages[0].members]) == ("pinned", ["ada"])
    plan["stages"][0]["machines"][0]["name"] = "grace"
    job["parallelism"] = {"plan": plan}
    checked = http.post("/jobs/check", json=job).json()["problems"]
    assert [one["field"] for one in checked] == ["parallelism.plan"]
    assert "it names grace, and no such machine has joined; there are ada" in checked[0]["problem"]
    fields = {"training.seed": {"values": [1, 2]}}
    sweep = {"kind": "sweep", "job": job, "search": {"kind": "grid"}, "fields": fields}
    checked = http.post("/jobs/check", json=sweep).json()["problems"]
    assert "job.parallelism.plan" in [one["field"] for one in checked], checked


@pytest.mark.slow
def test_one_step_of_a_jobs_own_plan(plane: Any, http: httpx.Client, client: Client) -> None:
    ada = arrive(plane, "ada", links=[Link("ada", HEAD, 1e-3, 1e8)])
    arrive(plane, "grace")
    plan = client.plan(llama()).plan
    assert plan.prediction is not None
    job_id = plane.store.jobs.create(parse_job(llama())).id
    problem(http.get(f"/jobs/{job_id}/timeline"), 409, "conflict")
    plane.store.jobs.begin(job_id, [])
    plane.store.progress.record(job_id, 1, [Planned(plan=plan)])
    answer = http.get(f"/jobs/{job_id}/timeline")
    timeline = PlanTimeline.model_validate(answer.json())
    assert http.get(f"/jobs/{job_id}/timeline").content == answer.content, "the same again"
    assert timeline.step_s == pytest.approx(plan.prediction.step_s)
    members = {(place, seat) for place, stage in enumerate(plan.stages) for seat in range(len(stage.members))}
    assert {(cell.stage, cell.member) for cell in timeline.cells} == members
    assert {(update.stage, update.member) for update in timeline.updates} == members
    assert timeline.cell_count == len(timeline.cells) == 2 * plan.microbatches * len(plan.stages)
    assert len(timeline.transfers) == 2 * plan.microbatches * (len(plan.stages) - 1)

    plane.store.contributors.ready(ada, capacity=[Device("cpu", "unmeasured", 2**33)], links=[])
    unknown = PlanTimeline.model_validate(http.get(f"/jobs/{job_id}/timeline").json())
    assert (unknown.step_s, unknown.problem) == (None, "the speed of ada was not measured")


def test_machines_that_were_not_measured_are_named_and_not_denied(plane: Any, http: httpx.Client) -> None:
    unmeasured = Device("cpu", "unmeasured", 2**33)
    arrive(plane, "grace", unmeasured)
    document = problem(http.post("/plans", json={"job": llama()}), 422, "plan-infeasible")
    assert "no ready machine (grace) has a measured speed" in document["detail"]
    assert document["details"] == {"machines_ready": 1}
    arrive(plane, "ada")
    report = PlanReport.model_validate(http.post("/plans", json={"job": llama(), "serving": {}}).json())
    assert report.serving is not None
    for made in (report.plan, report.serving.plan):
        assert [(machine.name, machine.reason) for machine in made.idle] == [("grace", NOT_MEASURED)]


@pytest.mark.slow
def test_labels_are_shown_and_machines_that_the_job_avoids_are_named(plane: Any, http: httpx.Client) -> None:
    ada = arrive(plane, "ada", site="paris", gpu="no")
    arrive(plane, "grace", site="oslo")
    assert http.get(f"/contributors/{ada}").json()["limits"]["labels"] == {"site": "paris", "gpu": "no"}
    topology = http.get("/topology").json()
    assert [one["labels"] for one in topology["contributors"]] == [
        {"site": "paris", "gpu": "no"},
        {"site": "oslo"},
    ]
    job = {**llama(), "parallelism": {"only": ["site=paris"]}}
    for body in ({"job": job}, {"job": job, "topology": topology, "strategy": "location"}):
        report = PlanReport.model_validate(http.post("/plans", json=body).json())
        assert report.plan.machines == {ada}
        assert [(one.name, one.reason) for one in report.plan.idle] == [
            ("grace", "avoided by the job: parallelism.only names site=paris")
        ]
    job["parallelism"] = {"avoid": ["site=paris", "site=oslo"]}
    document = problem(http.post("/plans", json={"job": job}), 422, "plan-infeasible")
    assert "it waits for a machine without site=paris or site=oslo" in document["detail"]
    job["parallelism"] = {"only": ["ada"], "avoid": ["ada"]}
    document = problem(http.post("/plans", json={"job": job}), 422, "invalid-request")
    assert "only and avoid both name 'ada'" in document["detail"]


@pytest.mark.slow
def test_too_little_memory_tells_how_much_is_missing(http: httpx.Client) -> None:
    body = {"job": llama(), "topology": machines(2, memory_bytes=2**26)}
    document = problem(http.post("/plans", json=body), 422, "plan-infeasible")
    assert document["details"]["missing_bytes"] > 2**26
    assert "missing" in document["detail"]


def test_a_model_that_cannot_be_built_is_the_submitters_to_fix(http: httpx.Client) -> None:
    job = llama()
    job["model"]["config"] = {"model_type": "no-such-model"}
    document = problem(http.post("/plans", json={"job": job, "topology": machines()}), 422, "invalid-request")
    assert "no-such-model" in document["detail"]


class TestOnPaper:
    """Without a server, in this process."""

    @staticmethod
    def plan(job: dict[str, Any], topology: dict[str, Any], **options: Any) -> Plan:
        return plan_on_paper(parse_job(job), parse_topology(topology), **options).plan

    def test_a_disconnected_topology_has_a_plan_on_one_machine(self) -> None:
        plan = self.plan(llama(), machines(2, bytes_per_s=0))
        assert sum(plan.stage_sizes) == 1
        assert len(plan.idle) == 1
        assert plan.idle[0].reason

    def test_a_disconnected_topology_cannot_hold_what_needs_both(self) -> None:
        need = self.plan(llama(), machines(1)).stages[0].members[0].memory_bytes
        with pytest.raises(PlanInfeasible) as error:
            self.plan(llama(), machines(2, memory_bytes=round(0.9 * need), bytes_per_s=0))
        assert error.value.hint
        joined = self.plan(llama(), machines(2, memory_bytes=round(0.9 * need)))
        assert sum(joined.stage_sizes) == 2

    def test_a_model_with_one_layer(self) -> None:
        layer = {"type": "linear", "options": {"in_features": 64, "out_features": 10}}
        plan = self.plan({"model": {"layers": [layer]}, "data": {"dataset": "digits"}}, machines(3))
        assert plan.num_layers == 1
        assert len(plan.stages) == 1

    def test_a_tokenizer_that_is_to_be_trained_gives_the_vocabulary(self) -> None:
        small = self.plan({**llama(), "tokenizer": {"vocab_size": 1000}}, machines(1))
        large = self.plan({**llama(), "tokenizer": {"vocab_size": 2000}}, machines(1))
        assert large.parameters - small.parameters == 1000 * 512 * 2

    def test_serving_counts_the_processes_of_a_member(self) -> None:
        topology = machines(1)
        topology["contributors"][0]["cpu_threads"] = 2
        needs = []
        for ranks in (1, 2):
            job = {**llama(), "parallelism": {"tensor": ranks}}
            served = plan_on_paper(
                parse_job(job), parse_topology(topology), serving=ServingRequest().workload(ranks)
            ).serving
            assert served is not None
            needs.append(served.plan.stages[0].members[0].memory_bytes)
        assert needs[1] - needs[0] == PROCESS_BYTES
        too_many = {**llama(), "parallelism": {"tensor": 3}}
        with pytest.raises(UserError, match="3 ranks cannot share 8 KV heads evenly"):
            plan_on_paper(parse_job(too_many), parse_topology(topology), serving=ServingRequest().workload(3))

    def test_a_model_folder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**llama()["model"]["config"], "vocab_size": 300}))
        job = {**llama(), "model": {"path": str(tmp_path)}}
        assert self.plan(job, machines(1)).num_layers == 8
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(UserError, match=r"config\.json cannot be read"):
            self.plan(job, machines(1))

    def test_samples_longer_than_the_window(self) -> None:
        job = llama(sequence_length=4096)
        job["model"]["config"]["max_position_embeddings"] = 2048
        with pytest.raises(UserError, match="longer than the model's window of 2048"):
            self.plan(job, machines(1))


def test_a_server_that_ends_does_not_wait_for_plans(plane: Any) -> None:
    plans = plane.app.state.context.plans
    with Client(plane.url, plane.api_key) as client, ThreadPoolExecutor() as threads:
        job = llama()
        job["model"]["config"]["intermediate_size"] = 200  # no other test's plan has measured this model
        pending = threads.submit(client.plan, job, topology=TopologyDocument.model_validate(machines()))
        # Only a plan that no process has answered yet can be cancelled.
        wait_until(lambda: plans.under_way or pending.done())
        plane.server.stop()
        with pytest.raises(Unavailable):
            pending.result()
    assert plans.under_way == 0


def test_no_machine_at_all(http: httpx.Client) -> None:
    for body in ({"job": llama()}, {"job": llama(), "topology": machines(0)}):
        document = problem(http.post("/plans", json=body), 422, "plan-infeasible")
        assert document["details"] == {"machines_ready": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"job": {"model": {}, "data": {}}}, "model: give exactly one of path, hub, config and layers"),
        (
            {"job": {"model": {"path": "/nowhere"}, "data": {"files": ["/x.txt"]}}},
            "/nowhere is not below a folder that jobs may read",
        ),
        ({"strategy": "best"}, "best"),
        (
            {"topology": {**machines(), "version": 7}},
            f"version 7; share-compute {__version__} reads version 1",
        ),
        ({"topology": {"kind": "train"}}, "kind 'train'"),
        ({"topology": machines(1, memory_bytes=-1)}, "memory_bytes"),
        ({"topology": {**machines(1), "conributors": []}}, "did you mean 'contributors'?"),
        ({"serving": {"objective": "fame"}}, "serving.objective"),
        ({"serving": {"prompt_tokens": 0}}, "serving.prompt_tokens"),
        ({"jobb": 1}, "did you mean 'job'?"),
    ],
)
def test_wrong_requests_are_refused_at_once(http: httpx.Client, change: dict[str, Any], message: str) -> None:
    body = {"job": llama(), "topology": machines(), **change}
    assert message in problem(http.post("/plans", json=body), 422, "invalid-request")["detail"]


def test_what_is_no_json_is_refused(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    problem(http.post("/plans", content=b"{", headers=headers), 422, "invalid-request")
    problem(http.post("/plans", content=b'{"job": NaN}', headers=headers), 422, "invalid-request")
    problem(http.post("/plans", content=b"job: {}"), 415, "unsupported-media-type")


def test_a_topology_of_ten_thousand_machines_is_too_much_for_one_request(http: httpx.Client) -> None:
    answer = http.post("/plans", json={"job": llama(), "topology": machines(10_000)})
    problem(answer, 413, "body-too-large")


def test_planning_needs_a_key(plane: Any) -> None:
    with Client(plane.url, "sck_wrong") as stranger, pytest.raises(NotAuthorized):
        stranger.topology()


def test_the_live_topology(plane: Any, client: Client) -> None:
    assert client.topology().contributors == ()
    ada = arrive(plane, "ada")
    grace = arrive(plane, "grace", links=[Link("gone", HEAD, 1.0, 1.0), Link(ada, HEAD, 1e-3, 1e8)])
    found = client.topology()
    assert [(machine.id, machine.name) for machine in found.contributors] == [(ada, "ada"), (grace, "grace")]
    assert found.contributors[0].devices[0].flops_per_s == {"float32": 4e11}
    assert [(link.source, link.target) for link in found.links] == [(ada, HEAD)]


def test_a_lying_probe_does_not_break_planning_for_the_others(
    plane: Any, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    honest = arrive(plane, "honest", links=[Link("honest", HEAD, -1.0, 1e8)])
    arrive(plane, "liar", Device("cpu", "dreamt of", -5, {"float32": 1e30}, 1e10))
    with caplog.at_level(logging.WARNING):
        topology = live_topology(plane.store.contributors.list())
    assert [machine.id for machine in topology.contributors] == [honest]
    assert topology.links == ()
    assert "liar" in caplog.text
    assert "latency_s" in caplog.text
    assert [machine.name for machine in client.topology().contributors] == ["honest"]


def test_absurd_measurements_are_not_written_down() -> None:
    with pytest.raises(VerificationFailed, match=r"flops_per_s\.float32") as error:
        require_sound([FAST, Device("cpu", "odd", 2**30, {"float32": math.nan})], "ada")
    assert error.value.machine == "ada"
    require_sound([FAST, Device("cpu", "unmeasured", 2**30)], "ada")
    require_sound([Device("cpu", "large", 2**40), Device("cuda", "other memory", 2**41)], "ada", 2**40)
    with pytest.raises(VerificationFailed, match=r"1\.0 TiB of memory, but lends 1\.0 GiB"):
        require_sound([Device("cpu", "boaster", 2**40)], "ada", 2**30)
    good = Link("a", "b", 1e-3, 0.0)
    assert sound_links([good, Link("a", "b", math.inf, 1e8), Link("a", "a", 1e-3, 1e8)], "a") == (good,)


class TestProcesses:
    """The planner as a process of its own."""

    @staticmethod
    def plan(processes: PlanProcesses, gone_after_s: float = 60.0) -> PlanReport | None:
        job = llama()
        job["model"]["config"]["initializer_range"] = (
            random()
        )  # a model in the profile cache would need no time and no memory
        request = PlanRequest.model_validate({"job": job, "topology": machines(1)})
        return asyncio.run(processes.plan(request, asyncio.sleep(gone_after_s)))

    def test_whoever_went_away_gets_no_answer(self) -> None:
        assert self.plan(PlanProcesses(), gone_after_s=0.05) is None

    def test_what_takes_too_long_is_ended(self) -> None:
        with pytest.raises(Unavailable, match=r"within 0\.05 s"):
            self.plan(PlanProcesses(timeout_s=0.05))

    def test_the_wait_for_a_turn_counts(self) -> None:
        with pytest.raises(Unavailable, match=r"the plans of others took all of 0\.05 s"):
            self.plan(PlanProcesses(at_once=0, timeout_s=0.05))

    def test_more_than_can_be_made_in_time_are_refused(self) -> None:
        with pytest.raises(Unavailable, match="0 plans are being made") as error:
            self.plan(PlanProcesses(most_under_way=0))
        assert error.value.hint

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a process to this limit")
    def test_what_takes_too_much_memory_is_refused(self) -> None:
        with pytest.raises(Unavailable, match="takes more than the 200 MiB of memory"):
            self.plan(PlanProcesses(memory_bytes=200 * 2**20))

    def test_a_process_that_breaks_is_no_fault_of_the_submitter(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with pytest.raises(Exception, match="the planner failed with an internal error") as error:
            self.plan(PlanProcesses())
        assert not isinstance(error.value, UserError | PlanInfeasible)
