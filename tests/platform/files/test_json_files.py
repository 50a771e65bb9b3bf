"""JSON files of models: each problem is named, and nothing above the maximum size is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from share_compute.errors import UserError
from share_compute.files.json_files import MOST_JSON_BYTES, read_json_file


def test_the_content_is_returned(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1]}')
    assert read_json_file(file, dict) == {"a": [1]}
    file.write_text("[1]")
    assert read_json_file(file, list) == [1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "a.json cannot be read: "),
        (b"\xff\xfe", "a.json cannot be read: "),
        (b"[" * 500_000, "a.json cannot be read: "),
        (b"[1]", "a.json is not a JSON object"),
        (b"{}" + b" " * MOST_JSON_BYTES, "a.json has 1.0 MiB; at most 1.0 MiB are read"),
    ],
)
def test_problems_are_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=problem) as caught:
        read_json_file(file, dict)
    assert caught.value.hint


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config cannot be read: Is a directory"):
        read_json_file(tmp_path, dict, shown="config")
