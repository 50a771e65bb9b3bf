"""``share-compute simulate``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.warm_commands import run_warm

from share_compute.errors import PlanInfeasible, UserError
from share_compute.files.topology_file import write_topology
from share_compute.simulation.fleet_name import FleetName
from share_compute.simulation.fleets import make_fleet
from share_compute_api.cli.submitter.simulate import average, chart
from share_compute_api.terminal.options import duration_s

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.yaml"
COMMAND = (sys.executable, "-c", "from share_compute_api.cli import main; main()", "simulate")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "COLUMNS": "120", "HOME": "/nonexistent"}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_warm(["simulate", *arguments], {**ENVIRONMENT, **environment})


def test_it_prints_throughput_losses_and_a_chart() -> None:
    done = run(
        str(EXAMPLE), "--fleet", "home", "--machines", "8", "--mtbf", "1h", "--hours", "6", "--seed", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "digits on 8 machines (home), 6 h 0 min: 17,258 parameters in 8 layers" in done.stdout
    assert "follows rules" in done.stdout
    for word in (
        "samples/s",
        "steps committed",
        "steps computed again in part",
        "use of all lent FLOP/s",
        "moving state",
        "█",
    ):
        assert word in done.stdout


@pytest.mark.slow
def test_rounds_print_merges_missing_branches_and_bytes(tmp_path: Path) -> None:
    job = yaml.safe_load(EXAMPLE.read_text())
    job["training"] |= {
        "synchronization": {"kind": "local", "branches": 4, "every": 50, "quorum": 3, "grace_s": 1}
    }
    file = tmp_path / "rounds.json"
    file.write_text(json.dumps(job))
    arguments = (str(file), "--fleet", "home", "--machines", "8", "--mtbf", "1h", "--hours", "1")
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert "digits on 8 machines (home), 1 h 0 min: 4 branches on" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120
    for words in (
        "merges",
        "contributions that were missing",
        "bytes sent by branches",
        "waiting for other branches",
    ):
        assert words in done.stdout
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["rounds"] > 0
    assert report["branches"] == 4


@pytest.mark.slow
def test_json_is_the_whole_report_and_the_same_each_time(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(write_topology(make_fleet(FleetName.campus, 5), "yaml"))
    arguments = (
        str(EXAMPLE),
        "--topology",
        str(file),
        "--mtbf",
        "2h",
        "--back-after",
        "90s",
        "--hours",
        "6",
        "--json",
    )
    first, second = run(*arguments), run(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    report = json.loads(first.stdout)
    assert report["machines"] == 5
    assert report["attempted_steps"] == report["committed_steps"] + report["lost_steps"]
    assert sum(report["hours"].values()) == pytest.approx(6 * 3600)


@pytest.mark.slow
def test_machines_that_the_job_avoids_are_left_out(tmp_path: Path) -> None:
    fleet, job = make_fleet(FleetName.campus, 5), yaml.safe_load(EXAMPLE.read_text())
    machines, file = tmp_path / "fleet.yaml", tmp_path / "job.yaml"
    machines.write_text(write_topology(fleet, "yaml"))
    arguments = (str(file), "--topology", str(machines), "--hours", "1", "--json")
    file.write_text(yaml.safe_dump({**job, "parallelism": {"avoid": [fleet.contributors[0].name]}}))
    assert json.loads(run(*arguments).stdout)["machines"] == 4
    file.write_text(yaml.safe_dump({**job, "parallelism": {"only": ["site=paris"]}}))
    refused = run(*arguments)
    assert refused.returncode == PlanInfeasible.exit_code
    assert "the job may use none of the 5 machines: it waits for a machine with site=paris" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mtbf", "soon"), "is not a time"),
        (("--mtbf", "0h"), "more than 0"),
        (("--hours", "0"), "--hours: must be at least 0.001"),
        (("--fleet", "home", "--topology", "a.yaml"), "exclude each other"),
        (("--machines", "7", "--topology", "a.yaml"), "exclude each other"),
        (("--back-after", "1h"), "--back-after without --mtbf"),
        (("--back-after", "xx", "--mtbf", "1h"), "is not a time"),
        (("--topology", "nowhere.yaml"), "nowhere.yaml does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = run(str(EXAMPLE), *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("5min", 300.0), ("1.5h", 5400.0), ("2d", 172800.0)]
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert duration_s(text, "--mtbf") == seconds


@pytest.mark.parametrize("text", ["", "4", "h", "-4h", "4 weeks", "nan h"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        duration_s(text, "--mtbf")


def test_a_chart_shows_nothing_where_there_is_nothing() -> None:
    bars = "▁▂▃▄▅▆▇█"
    assert chart((0.0, 1.0, 4.0, 8.0), bars) == " ▂▅█"
    assert chart((0.0, 0.0), bars) == "  "
    assert chart((), bars) == ""


def test_a_terminal_without_utf_8_gets_plain_letters() -> None:
    done = subprocess.run(  # an interpreter reads this variable when it starts
        [*COMMAND, str(EXAMPLE), "--machines", "3", "--hours", "1"],
        capture_output=True,
        text=True,
        check=False,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "####" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_it_ends_quietly_when_nobody_reads_on(form: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, str(EXAMPLE), "--machines", "4", "--hours", "1", *form],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("count", "shown"), [(0.0, "0.0"), (0.00208, "0.0021"), (0.4, "0.4"), (1234.5, "1,234.5")]
)
def test_small_averages_keep_their_digits(count: float, shown: str) -> None:
    assert average(count) == shown
