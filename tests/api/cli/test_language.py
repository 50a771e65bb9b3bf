"""Commands print for people in the language of the locale; JSON stays English."""

from __future__ import annotations

import io
import json

import pytest
from rich.cells import cell_len

from share_compute.errors import NotFound, UserError
from share_compute_api.terminal import output
from share_compute_api.terminal.language import translated

LOCALE = ("SHARE_COMPUTE_LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")


@pytest.fixture(autouse=True)
def _no_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOCALE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "is_chinese"),
    [
        ({}, False),
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "en_GB.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, True),
        ({"LANG": "zh_CN.UTF-8", "SHARE_COMPUTE_LANGUAGE": "en"}, False),
        ({"LANG": "C", "SHARE_COMPUTE_LANGUAGE": "zh"}, True),
        ({"LANG": "zh_CN.UTF-8", "SHARE_COMPUTE_LANGUAGE": "latin"}, False),
    ],
)
def test_the_setting_and_the_locale_choose_the_language(
    variables: dict[str, str], is_chinese: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (translated("no machine is ready") != "no machine is ready") == is_chinese


@pytest.fixture
def _chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")


@pytest.mark.usefixtures("_chinese")
def test_an_error_is_printed_in_chinese(capfd: pytest.CaptureFixture[str]) -> None:
    output.print_failure(NotFound("there is no job x", hint="share-compute jobs lists them"), as_json=False)
    fields = {"fields": [{"field": "training.steps", "problem": "must be at least 1"}], "more": 2}
    output.print_failure(UserError("fix these fields of the job", details=fields), as_json=False)
    assert [line.strip() for line in capfd.readouterr().err.splitlines()] == [
        "错误: 没有作业 x",
        "share-compute jobs 可列出它们",
        "错误: training.steps: 必须不小于 1",
        "以及另外 2 个",
    ]


@pytest.mark.usefixtures("_chinese")
def test_json_stays_english(capfd: pytest.CaptureFixture[str]) -> None:
    output.print_failure(NotFound("there is no job x"), as_json=True)
    assert json.loads(capfd.readouterr().err)["error"]["detail"] == "there is no job x"


@pytest.mark.usefixtures("_chinese")
@pytest.mark.parametrize("columns", [40, 80])
def test_tables_count_the_cells_of_wide_characters(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    console = output.Terminal()
    console.file = io.StringIO()
    monkeypatch.setattr(output, "console", console)
    reason = (
        "waiting for contributors: needs 4, 2 are ready (1 more works for other jobs); "
        "continues from its checkpoint of step 20"
    )
    rows = [("job-k3v7q2ma", "reason", output.state_text("queued"), reason)]
    output.print_table(("id", "name", "state", "reason"), rows, empty="No jobs yet.")
    lines = console.file.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= columns
    shown = "".join("".join(lines).split())
    # The name of a job is data, also if it is a word of the catalogue.
    assert "reason" in shown
    assert "排队中" in shown
    assert "状态" in shown
    assert "…" not in shown


@pytest.mark.usefixtures("_chinese")
def test_data_is_not_translated() -> None:
    console = output.Terminal()
    console.file = io.StringIO()
    console.print("no machine is ready", markup=False)
    console.print("no machine is ready")
    assert console.file.getvalue().splitlines() == ["no machine is ready", "没有就绪的机器"]
