"""The checkpoint from which a job continues, if some are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from share_compute.errors import UserError
from share_compute.models.storage.checkpoints import STATE, newest_whole
from share_compute.models.storage.weights import FolderWriter, stream_file


def checkpoint(parent: Path, step: int) -> Path:
    writer = FolderWriter(parent / f"step-{step:08}")
    for stem in ("model", "optimizer"):
        for piece in stream_file({"a": torch.full((100,), float(step))}):
            writer.write(f"{stem}-0000-0000.part", piece)
    writer.write_json(STATE, {"step": step})
    writer.finish()
    return writer.target


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-7] ^= 4
    file.write_bytes(content)


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [checkpoint(tmp_path, step) for step in (5, 10, 15)]


def test_the_one_that_is_wanted_is_taken_if_it_is_whole(three: list[Path]) -> None:
    assert newest_whole(three[1]) == (three[1], ())


def test_the_next_older_whole_one_is_taken_and_the_others_are_named(three: list[Path]) -> None:
    flip(three[2] / "optimizer.safetensors")
    (three[1] / STATE).unlink()
    folder, notes = newest_whole(three[2])
    assert folder == three[0]
    assert "step-00000015/optimizer.safetensors is damaged" in notes[0]
    assert "step-00000010/training.json is missing" in notes[1]
    # Damaged folders are set aside: they do not count as kept checkpoints, and are not tried again.
    assert [path.name for path in sorted(three[0].parent.iterdir())] == [
        ".step-00000010.damaged", ".step-00000015.damaged", "step-00000005"
    ]  # fmt: skip
    assert newest_whole(three[2]) == (three[0], ())


def test_one_that_was_deleted_for_newer_ones_is_not_missed(three: list[Path]) -> None:
    assert newest_whole(three[0].with_name("step-00000001")) == (three[2], ())


def test_when_none_is_whole_the_error_says_what_to_do(three: list[Path]) -> None:
    for folder in three:
        flip(folder / "model.safetensors")
    with pytest.raises(
        UserError, match=r"no checkpoint of the job is whole: .*step-00000015/model"
    ) as refused:
        newest_whole(three[2])
    assert refused.value.hint is not None
    assert str(three[0].parent) in refused.value.hint
    folder, notes = newest_whole(three[2])
    assert folder is None
    assert "begins with its first step" in notes[0]


def test_damage_without_checksums_is_found_where_it_can_be(three: list[Path]) -> None:
    for folder in three:
        (folder / "checksums.json").unlink()
    (three[2] / STATE).write_text('{"step": 1')
    assert newest_whole(three[2]).folder == three[1]
