"""``share-compute simulate``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from share_compute.errors import UserError
from share_compute.simulation.fleet_name import FleetName
from share_compute.simulation.fleets import make_fleet
from share_compute.topology_file import write_topology
from share_compute_api.cli.simulate import chart, parse_time

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.yaml"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from share_compute_api.cli import main; main()", "simulate", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "120", "HOME": "/nonexistent"},
    )


def test_it_prints_throughput_losses_and_a_chart() -> None:
    done = run(
        str(EXAMPLE), "--fleet", "home", "--machines", "8", "--mtbf", "1h", "--hours", "6", "--seed", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "digits on 8 machines (home), 6 h 0 min" in done.stdout
    for word in ("samples/s", "steps committed", "steps lost", "use of all lent FLOP/s", "moving state", "█"):
        assert word in done.stdout


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mtbf", "soon"), "is not a time"),
        (("--mtbf", "0h"), "more than 0"),
        (("--hours", "0"), "more than 0"),
        (("--fleet", "home", "--topology", "a.yaml"), "exclude each other"),
        (("--topology", "nowhere.yaml"), "cannot be read"),
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
    assert parse_time(text, "--mtbf") == seconds


@pytest.mark.parametrize("text", ["", "4", "h", "-4h", "4 weeks", "nan h"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_time(text, "--mtbf")


def test_a_chart_shows_nothing_where_there_is_nothing() -> None:
    assert chart((0.0, 1.0, 4.0, 8.0)) == " ▂▅█"
    assert chart((0.0, 0.0)) == "  "
    assert chart(()) == ""
