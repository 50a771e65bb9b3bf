"""Chinese sentences fit a terminal of 80 columns: lines end between characters, and no mark is alone."""
# ruff: noqa: RUF001

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from share_compute_api.terminal.output import Terminal
from share_compute_api.terminal.tables import WholeTable
from share_compute_api.terminal.wide import divided

PROSE = (
    "机器 ada 没有响应：其代理程序不应答，但 Ray 节点应答；请服务器的运维人员用 share-compute invite 创建一个邀请，"
    "然后运行 share-compute join https://192.0.2.1:8700（见文档）。此方案比下界高 12%，已证明。"
)


def lines_of(renderable: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    with terminal.capture() as capture:
        terminal.print(renderable, crop=False)
    return capture.get().splitlines()


def grid() -> Table:
    """Return a table like that of `share-compute join`."""
    table = Table.grid(padding=(0, 2))
    table.add_row("[dim]状态[/]", PROSE)
    return table


@pytest.mark.parametrize(
    "renderable",
    [
        f"[bold]{PROSE}[/]",
        Text(PROSE),
        grid(),
        WholeTable(("name", "state", "reason"), [("ada", "ready", PROSE)]),
        WholeTable(("name", *map(str, range(9)), "reason"), [("ada", *["9999999"] * 9, PROSE)]),
    ],
    ids=["markup", "text", "grid", "table", "paragraphs"],
)
def test_a_chinese_sentence_fits_80_columns(renderable: object, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = lines_of(renderable, monkeypatch)
    assert max(map(cell_len, lines)) <= 80
    assert not any(line.strip().startswith(("，", "。", "；", "：", "）")) for line in lines)
    assert not any(line.rstrip().endswith("（") for line in lines)
    for word in ("share-compute invite", "https://192.0.2.1:8700", "已证明"):
        assert word.replace(" ", "") in "".join("".join(lines).split())
    # Lines are filled: Chinese text does not move to the next line as one word.
    assert sum(cell_len(line.rstrip()) > 60 for line in lines) >= 2


@given(st.text(st.sampled_from("机器，。（） ab-9"), max_size=120), st.integers(2, 40))
def test_no_character_is_lost_between_lines(text: str, most: int) -> None:
    lines = divided(Text(text), most)
    assert "".join("".join(line.plain.split()) for line in lines) == "".join(text.split())
