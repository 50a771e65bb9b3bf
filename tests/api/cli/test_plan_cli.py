"""``share-compute plan`` and ``share-compute topology``, as people and scripts use them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from rich.console import Console
from tests.platform.planning.models import PROFILE, job, machine, make_plan

from share_compute.errors import PlanInfeasible
from share_compute.files.topology_file import read_topology
from share_compute.planning.plan import (
    Bottleneck,
    IdleMachine,
    MemberPlan,
    Plan,
    Prediction,
    StagePlan,
)
from share_compute.planning.report import Alternative, PlanReport, ServingPrediction, TimelineCell
from share_compute.quantities import bytes_text
from share_compute.topology import Device, Link, Topology
from share_compute_api.cli.submitter.plan import print_missing
from share_compute_api.terminal import report as reports
from share_compute_api.terminal.completion import complete_strategy
from share_compute_api.terminal.describe import idle_lines, placement
from share_compute_api.terminal.picture import layers_over_machines, timeline

Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[3]
LAN = ROOT / "examples" / "topologies" / "lan.yaml"
TINY = ROOT / "examples" / "tiny-llama.yaml"
NOWHERE = {"SHARE_COMPUTE_URL": "http://127.0.0.1:9", "COLUMNS": "80"}
"""Address without a server: planning from a topology file needs none."""


def error(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stderr)["error"]
    assert document["hint"]
    return document


@pytest.mark.slow
def test_a_plan_is_written_and_pinned(run: Run, tmp_path: Path) -> None:
    plan, pinning = tmp_path / "plan.yaml", tmp_path / "job.yaml"
    words = ("--topology", str(LAN))
    done = run("plan", str(TINY), *words, "--json", "--output", str(plan), **NOWHERE)
    first = json.loads(done.stdout)["plan"]
    document = yaml.safe_load(TINY.read_text())
    parallelism = {"plan": "plan.yaml"}
    pinning.write_text(yaml.safe_dump({**document, "parallelism": parallelism}))
    found = json.loads(run("plan", str(pinning), *words, "--json", **NOWHERE).stdout)["plan"]
    assert found["strategy"] == "pinned"
    assert found["model_digest"] == first["model_digest"]
    assert [stage["start"] for stage in found["stages"]] == [stage["start"] for stage in first["stages"]]
    for option in ("--objective=latency", "--operators"):
        refused = run("plan", str(TINY), *words, "--output", str(plan), option, "--json", **NOWHERE)
        assert "--output means nothing" in error(refused)["detail"]
    shown = run("plan", str(pinning), *words, "--output", str(plan), **NOWHERE)
    words_shown = " ".join(shown.stdout.split())
    assert "a job file pins it with parallelism.plan" in words_shown
    assert "the best that was found" not in words_shown
    plan.write_text(plan.read_text().replace("name: ", "name: other-", 1))
    refused = run("plan", str(pinning), *words, "--json", **NOWHERE)
    assert refused.returncode == PlanInfeasible.exit_code
    assert "is not among the job's machines; ready are " in error(refused)["detail"]


@pytest.mark.slow
def test_a_sparse_model_shows_the_machines_that_it_would_use(run: Run, tmp_path: Path) -> None:
    words = ROOT / "examples" / "words.yaml"
    done = run("plan", str(words), "--topology", str(LAN), **NOWHERE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("words: 2 workers and 1 server on ")
    assert "would stay free" in done.stdout
    found = json.loads(run("plan", str(words), "--topology", str(LAN), "--json", **NOWHERE).stdout)
    assert len(found["machines"]) == 2
    selecting = tmp_path / "words.yaml"
    document = yaml.safe_load(words.read_text())
    selecting.write_text(yaml.safe_dump({**document, "parallelism": {"only": ["laptop"]}}))
    done = run("plan", str(selecting), "--topology", str(LAN), **NOWHERE)
    assert done.stdout.startswith("words: 2 workers and 1 server on laptop")
    assert "would stay free" not in done.stdout
    refused = run("plan", str(words), "--topology", str(LAN), "--json", "--strategy", "uniform", **NOWHERE)
    assert "--strategy means nothing for kind: sparse" in error(refused)["detail"]
    refused = run("simulate", str(words), "--topology", str(LAN), "--json", **NOWHERE)
    assert "kind: sparse has rows of weights and no layers" in error(refused)["detail"]


@pytest.mark.slow
def test_planning_on_paper_needs_no_server(run: Run) -> None:
    done = run("plan", str(TINY), "--topology", str(LAN), "--compare", **NOWHERE)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for expected in ("tiny-llama: 6 layers", "samples/s", "No plan takes less than", "Layers", "desk-1"):
        assert expected in done.stdout
    for strategy in ("auto", "uniform", "memory_weighted"):
        assert strategy in done.stdout
    for words in (
        "Policies",
        "lockstep",
        "diloco ",
        "sparse_loco ",
        "elastic",
        "gossip, ring",
        "server, staleness 1",
        "received  busy",
        "  own",
        "Branches train apart",
    ):
        assert words in done.stdout
    assert "\x1b" not in done.stdout, "no colours in a pipe"


@pytest.mark.slow
def test_operators_are_planned_on_the_devices_of_one_machine(run: Run, tmp_path: Path) -> None:
    drawn = tmp_path / "layer.dot"
    options = ("--operators", "--topology", str(LAN), "--devices", "2")
    done = run("plan", str(TINY), *options, "--fixed", "mlp.down_proj=row", "--dot", str(drawn), **NOWHERE)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    for words in ("operators on 2 devices of desk-1", "not measured, assumed", "6 layers", "row (given)"):
        assert words in done.stdout
    assert drawn.read_text().startswith("digraph operators {")
    done = run("plan", str(TINY), *options, "--json", "--search", "sharding_propagation", **NOWHERE)
    (layer,) = json.loads(done.stdout)["layers"]
    assert layer["layers"] == [0, 1, 2, 3, 4, 5]
    assert {each["name"] for each in layer["operators"]} >= {"mlp.down_proj", "self_attn.q_proj"}


@pytest.mark.slow
def test_operators_that_cannot_be_planned_are_refused(run: Run) -> None:
    options = ("plan", str(TINY), "--operators", "--topology", str(LAN), "--json")
    refused = run(*options, "--devices", "64", **NOWHERE)
    assert "no machine has 64 devices" in error(refused)["detail"]
    refused = run(*options, "--fixed", "mlp.down=row", **NOWHERE)
    assert "no operator matches 'mlp.down'" in error(refused)["detail"]
    assert "mlp.down_proj" in error(refused)["hint"]
    refused = run(*options, "--devices", "4", "--fixed", "*dot_product_attention=heads", **NOWHERE)
    assert "4 devices cannot divide 2 evenly" in error(refused)["detail"]
    refused = run(*options, "--fixed", "mlp.down_proj", **NOWHERE)
    assert "OPERATOR=STRATEGY" in error(refused)["detail"]
    refused = run(*options, "--strategy", "auto", **NOWHERE)
    assert "--strategy means nothing with --operators" in error(refused)["detail"]
    refused = run("plan", str(TINY), "--devices", "2", "--json", **NOWHERE)
    assert "--devices means nothing without --operators" in error(refused)["detail"]


@pytest.mark.slow
def test_a_job_with_rounds_shows_islands_and_what_a_round_exchanges(run: Run, tmp_path: Path) -> None:
    job = tmp_path / "rounds.yaml"
    job.write_text(
        "model: {config: {model_type: llama, vocab_size: 2048, hidden_size: 128, intermediate_size: 352,"
        " num_hidden_layers: 4}}\n"
        "data: {files: [corpus.txt]}\n"
        "training:\n"
        "  synchronization: {kind: local, branches: 2, every: 20, servers: 2}\n"
        "  compression: {name: int8}\n"
    )
    done = run("plan", str(job), "--topology", str(LAN), **NOWHERE)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for expected in (
        "The weights are merged in 2 ranges on ",
        "with 2 branches",
        "a step of branch 0,",
        "a round of 20 steps",
        "Each branch sends",
        "times less than float32",
        "Lockstep AllReduce would send",
        "Lockstep AllReduce on these machines would compute",
    ):
        assert expected in text
    found = json.loads(run("plan", str(job), "--topology", str(LAN), "--json", **NOWHERE).stdout)
    assert [branch["number"] for branch in found["plan"]["branches"]] == [0, 1]
    assert sorted(number for island in found["rounds"]["islands"] for number in island["branches"]) == [0, 1]
    assert len(found["rounds"]["range_machines"]) == 2


@pytest.mark.slow
def test_the_codec_and_the_bytes_of_a_boundary_are_shown(run: Run, tmp_path: Path) -> None:
    job = tmp_path / "compressed.yaml"
    job.write_text(
        "model: {config: {model_type: llama, vocab_size: 2048, hidden_size: 128, intermediate_size: 352,"
        " num_hidden_layers: 4}}\n"
        "data: {files: [corpus.txt]}\n"
        "training: {batch_size: 16, microbatches: 4, boundary_compression: {name: int8}}\n"
        "parallelism: {stages: 2, members_per_stage: 1}\n"
    )
    done = run("plan", str(job), "--topology", str(LAN), **NOWHERE)
    assert done.returncode == 0, done.stderr
    # 4 samples of 128 tokens with 128 numbers, and a scale of two bytes for 256 numbers.
    assert re.search(r"before layer \d: 64.5 KiB a microbatch each way, int8", done.stdout), done.stdout
    done = run("plan", str(job), "--topology", str(LAN), "--json", **NOWHERE)
    (first, second) = json.loads(done.stdout)["plan"]["stages"]
    assert (first["boundary_codec"], first["boundary_bytes"]) == ("int8", 65536 + 512)
    assert (second["boundary_codec"], second["boundary_bytes"]) == ("none", None)


@pytest.mark.slow
def test_the_report_for_scripts(run: Run) -> None:
    done = run(
        "plan",
        str(TINY),
        "--topology",
        str(LAN),
        "--json",
        "--objective",
        "latency",
        **NOWHERE,
    )
    assert done.returncode == 0, done.stderr
    found = PlanReport.model_validate_json(done.stdout)
    assert found.plan.prediction is not None
    assert json.loads(done.stdout)["plan"]["prediction"]["gap"] == found.plan.prediction.gap
    assert found.serving is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--objective", "latency", "--compare"), "--compare means nothing for objective latency"),
        (("--objective", "latency", "--strategy", "auto"), "--strategy means nothing"),
        (("--concurrent", "4"), "--concurrent means nothing for objective training"),
        (("--objective", "latency", "--next-token-limit", "1"), "--next-token-limit means nothing"),
        (("--objective", "throughput", "--first-token-limit", "-1"), "--first-token-limit: "),
    ],
)
def test_options_that_mean_nothing_are_refused(run: Run, options: tuple[str, ...], message: str) -> None:
    refused = run("plan", str(TINY), "--topology", str(LAN), "--json", *options, **NOWHERE)
    assert message in error(refused)["detail"]
    assert refused.returncode == 2


def test_serving_that_does_not_fit_is_no_training_plan(run: Run) -> None:
    options = ("--objective", "latency", "--concurrent", "1000000")
    done = run("plan", str(TINY), "--topology", str(LAN), *options, **NOWHERE)
    assert done.returncode == 6
    assert done.stdout == ""
    assert "serving 1000000 at a time" in done.stderr
    assert "serve at most" in done.stderr


def test_a_job_that_does_not_fit(run: Run, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    text = LAN.read_text()
    for size in ("32e9", "24e9", "16e9", "8e9", "4e9"):
        text = text.replace(f"memory_bytes: {size}", "memory_bytes: 1e7")
    small.write_text(text)
    done = run("plan", str(TINY), "--topology", str(small), "--json", **NOWHERE)
    assert done.returncode == 6
    assert error(done)["details"]["missing_bytes"] > 0


@pytest.mark.slow
def test_planning_with_the_server(plane: Any, run: Run, tmp_path: Path) -> None:
    _, code = plane.store.invites.create()
    record, _ = plane.store.contributors.join(code, name="ada", host="ada", versions={}, limits={})
    plane.store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
    device = Device("cpu", "some cpu", 2**33, {"float32": 2e11}, 2e10)
    plane.store.contributors.ready(record.id, capacity=[device], links=[Link(record.id, "head", 1e-3, 1e8)])
    planned = run("plan", str(TINY))
    assert planned.returncode == 0, planned.stderr
    assert "ada" in planned.stdout
    refused = run("plan", str(TINY), "--operators")
    assert "no machine has 2 devices: ada has the most: 1" in refused.stderr
    file = tmp_path / "cluster.yaml"
    written = run("topology", "--output", str(file))
    assert written.returncode == 0, written.stderr
    assert "1 machine and 1 links written" in written.stdout
    printed = run("topology", "--json")
    kept = read_topology(file.read_text())
    assert read_topology(printed.stdout) == kept
    assert kept.contributors[0].name == "ada"
    unwritable = run("topology", "-o", str(tmp_path / "no" / "stage.json"))
    assert (unwritable.returncode, "Traceback" in unwritable.stderr) == (2, False)


@pytest.mark.parametrize(
    ("topology", "code", "message"),
    [
        ("kind: topology\nversion: 9\n", "invalid-request", "version 9"),
        ("kind: topology\nversion: 1\n", "plan-infeasible", "no machine to plan on"),
        (
            "kind: topology\nversion: 1\ncontributors: [{name: a}]\n",
            "invalid-request",
            "contributors.0.devices (a)",
        ),
        ("{", "invalid-request", "line 1"),
    ],
)
def test_topologies_that_cannot_be_planned_on(
    run: Run, tmp_path: Path, topology: str, code: str, message: str
) -> None:
    file = tmp_path / "topology.yaml"
    file.write_text(topology)
    done = run("plan", str(TINY), "--topology", str(file), "--json", **NOWHERE)
    document = error(done)
    assert document["code"] == code
    assert message in document["detail"]
    assert done.returncode == (6 if code == "plan-infeasible" else 2)


def test_files_and_strategies_that_do_not_exist(run: Run, tmp_path: Path) -> None:
    missing = run("plan", str(TINY), "--topology", str(tmp_path / "none.yaml"), "--json", **NOWHERE)
    assert "none.yaml does not exist" in error(missing)["detail"]
    unknown = run("plan", str(TINY), "--topology", str(LAN), "--strategy", "unifrom", "--json", **NOWHERE)
    assert "unifrom" in error(unknown)["detail"]
    assert unknown.returncode == missing.returncode == 2


def test_strategies_are_completed() -> None:
    assert complete_strategy("un") == ["uniform"]
    assert "auto" in complete_strategy("")


def plan(stages: int, members: int = 1, *, names: str = "machine") -> Plan:
    return Plan(
        epoch=0,
        model_id="m",
        strategy="auto",
        num_layers=2 * stages,
        parameters=10,
        microbatches=2,
        stages=tuple(
            StagePlan(
                start=2 * stage,
                stop=2 * stage + 2,
                parameters=5,
                members=tuple(
                    MemberPlan(
                        contributor_id=f"{stage}-{member}",
                        name=f"{names}-{stage}-{member}",
                        microbatches=(member,),
                        memory_bytes=2**30,
                        lent_bytes=2**31,
                        busy_fraction=0.5,
                        reason="it [is] fast",
                    )
                    for member in range(members)
                ),
            )
            for stage in range(stages)
        ),
        idle=(IdleMachine(contributor_id="x", name="slow[1]", reason="it would slow the job down"),),
        prediction=Prediction(
            step_s=0.5,
            formula_s=0.5,
            lower_bound_s=0.4,
            samples_per_s=32.0,
            tokens_per_s=4096.0,
            bottleneck=Bottleneck(kind="compute", where="machine-0-0", sentence="machine-0-0 holds it back"),
            exact=False,
            links_assumed=True,
        ),
    )


def cells(stages: int, members: int = 1) -> list[TimelineCell]:
    return [
        TimelineCell(
            stage=stage,
            member=member,
            microbatch=0,
            kind=kind,
            start_s=stage + shift,
            stop_s=stage + shift + 0.9,
        )
        for stage in range(stages)
        for member in range(members)
        for kind, shift in (("F", 0.0), ("B", 2.0 * stages))
    ]


class TestPictures:
    """Pictures fit the terminal and show the plan."""

    @pytest.mark.parametrize("width", [60, 80, 120])
    @pytest.mark.parametrize(("stages", "members"), [(1, 1), (3, 2), (5, 9), (60, 1), (300, 1)])
    def test_everything_fits(self, width: int, stages: int, members: int) -> None:
        console = Console(width=width)
        made = plan(stages, members, names="a-machine-with-quite-a-long-name")
        for picture in (layers_over_machines(made, console), timeline(made, cells(stages, members), console)):
            assert max(len(line.rstrip()) for line in picture.plain.splitlines()) <= width

    def test_a_step(self) -> None:
        picture = timeline(plan(2), cells(2), Console(width=80)).plain.splitlines()
        first, second = picture[0], picture[1]
        assert first.startswith("machine-0-0")
        assert first.count("0░") == first.count("0▓") == 1
        assert first.index("░") < second.index("░") < first.index("▓") < second.index("▓")
        assert "·" in first

    def test_what_follows_the_last_cell_is_drawn_too(self) -> None:
        made = plan(2)
        assert made.prediction is not None
        longer = made.model_copy(update={"prediction": made.prediction.model_copy(update={"step_s": 12.0})})
        picture = timeline(longer, cells(2), Console(width=80)).plain.splitlines()
        ends_at = max(cell.stop_s for cell in cells(2)) / 12.0
        for row in picture[:2]:
            assert row.count("+") == pytest.approx((1 - ends_at) * (80 - len("machine-0-0  ")), abs=1)
            assert row.endswith("+")
        assert picture[2].endswith("12.00 s")
        assert "+ sums, update" in picture[3]

    def test_reasons_stand_below_in_a_narrow_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        console = Console(width=50)
        monkeypatch.setattr(reports, "console", console)
        with console.capture() as capture:
            reports.print_report(PlanReport(plan=plan(2)))
        assert "machine-0-0: it [is] fast" in capture.get().splitlines()
        assert max(map(len, capture.get().splitlines())) <= 50

    def test_machines_with_one_reason_stand_together(self) -> None:
        idle = [IdleMachine(contributor_id=f"{n}", name=f"m{n}", reason="it is slow") for n in range(9)]
        other = IdleMachine(contributor_id="x", name="far", reason="its link is dead")
        assert idle_lines([*idle, other]) == [
            ("m0, m1, m2, m3, m4 and 4 more, each of them", "it is slow"),
            ("far", "its link is dead"),
        ]
        many = [IdleMachine(contributor_id=f"{n}", name=f"m{n}", reason=f"reason {n}") for n in range(50)]
        assert len(idle_lines(many)) == 41
        assert idle_lines(many)[-1] == ("", "10 more reasons; --json has them all")

    def test_plain_letters_where_the_terminal_has_no_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        console = Console(width=80)
        monkeypatch.setattr(Console, "encoding", "ascii")
        text = layers_over_machines(plan(3), console).plain + timeline(plan(3), cells(3), console).plain
        text.encode("ascii")
        assert "###" in text
        assert "==" in text

    def test_a_report(self, monkeypatch: pytest.MonkeyPatch) -> None:
        console = Console(width=80)
        monkeypatch.setattr(reports, "console", console)
        rows = (
            Alternative(strategy="uniform", step_s=1.0, samples_per_s=16.0, stages=2, machines=2),
            Alternative(strategy="memory_weighted", problem="laptop [x] lacks 3 bytes"),
        )
        with console.capture() as capture:
            reports.print_report(PlanReport(plan=plan(2), timeline=cells(2), alternatives=rows))
        text = capture.get()
        for expected in (
            "500.0 ms a step",
            "25.0% above, the best that was found",
            "machine-0-0 holds it back",
            "No link was measured",
            "1.0 GiB 50%",
            "it [is] fast",
            "slow[1]: it would slow the job down",
            "2.00",
            "memory_weighted finds no plan: laptop [x] lacks 3 bytes",
        ):
            assert expected in " ".join(text.split())
        assert max(map(len, text.splitlines())) <= 80

    def test_the_algorithm_of_gradient_sums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machines = [machine(name) for name in "abcd"]
        links = [
            Link(one.id, other.id, *((5e-4, 1e8) if one.id + other.id in ("ab", "cd") else (2e-2, 1e6)))
            for one, other in combinations(machines, 2)
        ]
        spec = job(stages=1, members_per_stage=4)
        found = make_plan(spec, Topology(tuple(machines), tuple(links)), PROFILE)
        console = Console(width=100)
        monkeypatch.setattr(reports, "console", console)
        with console.capture() as capture:
            reports.print_report(PlanReport(plan=found))
        size = bytes_text(4 * PROFILE.parameters)
        for expected in (
            "layers 0-11: hierarchical; each of 4 members receives at most",
            f"each of 2 sites sends at most {size} to others",
            "predicted: hierarchical 10.7 min, tree 10.7 min, ring 18.7 min, sharded 21.3 min",
        ):
            assert expected in " ".join(capture.get().split())
        (stage,) = Plan.model_validate_json(found.model_dump_json()).stages
        assert stage.sums == found.stages[0].sums

    def test_many_machines_are_cut_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        console = Console(width=100)
        monkeypatch.setattr(reports, "console", console)
        with console.capture() as capture:
            reports.print_report(PlanReport(plan=plan(500)))
        assert "and 460 more; --json has them all" in capture.get()
        assert len(capture.get().splitlines()) < 100

    @pytest.mark.parametrize("objective", ["latency", "throughput"])
    def test_a_report_of_serving(
        self, monkeypatch: pytest.MonkeyPatch, objective: Literal["latency", "throughput"]
    ) -> None:
        console = Console(width=80)
        monkeypatch.setattr(reports, "console", console)
        serving = ServingPrediction(
            objective=objective,
            plan=plan(2),
            first_token_s=1.0,
            next_token_s=0.5,
            request_s=5.0,
            tokens_per_s=32.0,
            lower_bound_s=4.0 if objective == "latency" else 0.4,
            bottleneck=Bottleneck(
                kind="link", where="a and b", sentence="the link between a and b [/] is slow"
            ),
            exact=True,
            speeds_assumed=True,
        )
        with console.capture() as capture:
            reports.print_report(PlanReport(plan=plan(2), serving=serving))
        text = " ".join(capture.get().split())
        none = "No request takes" if objective == "latency" else "No token follows the one before it in"
        least = "4.00 s" if objective == "latency" else "400.0 ms"
        assert f"{none} less than {least}; this one is 25.0% above, proven best by the formula." in text
        assert "the link between a and b [/] is slow" in text
        assert "No machine's speed was measured" in text


def test_a_placement_of_many_stays_one_line() -> None:
    text = placement(plan(500, members=9))
    assert text.startswith("layers 0-1: machine-0-0 + machine-0-1 + ")
    assert "machine-0-5 + 3 more; layers 2-3: " in text
    assert "; ... and 492 more stages; idle: slow[1]" in text
    assert len(text) < 1000


def test_what_would_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    details = {
        "missing_by_machine": {f"machine-{number}": 3 * 2**30 for number in range(12)},
        "would_fit": ["first, which is the hint", "set training.microbatches to 8"],
    }
    print_missing(PlanInfeasible("no", hint="first, which is the hint", details=details))
    text = capsys.readouterr().err
    assert "machine-0 lacks 3.0 GiB (3221225472 bytes)" in text
    assert "and 2 more machines lack memory" in text
    assert "or: set training.microbatches to 8" in text
    assert "first" not in text
