"""Weight folders: single tensors are read, pieces are written, and incomplete folders are never visible."""

import json
import math
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from share_compute.errors import Unavailable, UserError
from share_compute.models.storage.checksums import damage
from share_compute.models.storage.weights import (
    FolderWriter,
    WeightFolder,
    copy_into,
    files,
    finished_folders,
    prune_folders,
    rename_damaged,
    row_ranges,
    stream_file,
    sweep_partial,
)


def write_folder(target: Path, tensors: Mapping[str, torch.Tensor], limit_bytes: int = 2**30) -> int:
    writer = FolderWriter(target)
    for number, group in enumerate(files(tensors, limit_bytes)):
        for piece in stream_file(group):
            writer.write(f"model-0000-{number:04}.part", piece)
    return writer.finish()


def test_files_cover_all_tensors_within_the_limit() -> None:
    tensors = {f"t{index}": torch.rand(10) for index in range(7)} | {"large": torch.rand(100)}
    groups = list(files(tensors, limit_bytes=100))
    assert [name for group in groups for name in group] == list(tensors)
    assert all(sum(tensor.nbytes for tensor in group.values()) <= 100 or len(group) == 1 for group in groups)


@given(st.lists(st.integers(0, 40), max_size=3), st.integers(1, 200))
def test_row_ranges_cover_a_tensor(shape: list[int], limit_bytes: int) -> None:
    ranges = row_ranges(shape, 4, limit_bytes)
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    parts = [tensor[start:stop] if shape else tensor for start, stop in ranges]
    assert torch.equal(torch.cat(parts) if shape else parts[0], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_streamed_file_is_what_safetensors_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.ones(3, 5).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.ones(0).to(dtype),
    }
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"".join(stream_file(tensors)))
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in tensors.items()
    )


def test_a_folder_of_several_files_reads_like_one(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.rand(3, index + 1) for index in range(4)}
    size = write_folder(tmp_path / "out", tensors, limit_bytes=30)
    assert size == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    folder = WeightFolder(tmp_path / "out")
    assert folder.names() == sorted(tensors)
    assert folder.shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())
    assert torch.equal(folder.read("t2", 1, 3), tensors["t2"][1:3])


def test_one_file_has_the_plain_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", {"a": torch.ones(2)})
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], torch.ones(2))


def test_finishing_replaces_an_older_folder(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        write_folder(tmp_path / "out", {"a": torch.full((2,), value)})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert WeightFolder(tmp_path / "out").read("a")[0] == 2.0


def test_nothing_is_shown_before_it_is_whole(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "out")
    writer.write("model-0000-0000.part", b"half of it")
    assert not (tmp_path / "out").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "out")
    child = os.fork()
    if child == 0:  # the limit applies to the whole process, so the test runs in its own process
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            writer.write("model-0000-0000.part", b"x" * 5000)
        except Unavailable as failure:
            os._exit(0 if failure.hint and "disk" in failure.hint else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="no model"):
        WeightFolder(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        WeightFolder(tmp_path)


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", {"a": torch.ones(2)})
    with pytest.raises(UserError, match="no tensor 'b'"):
        WeightFolder(tmp_path / "out").read("b")
    with pytest.raises(UserError, match="2 numbers where the configuration wants"):
        copy_into(
            torch.ones(3), 0, None, np.frombuffer(np.ones(2, dtype=np.float32).tobytes(), dtype=np.uint8)
        )


def test_rows_are_copied_into_their_place() -> None:
    target = torch.zeros(3, 2)
    copy_into(target, 1, 3, np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), dtype=np.uint8))
    assert target.tolist() == [[0, 0], [0, 1], [2, 3]]


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 20, 3):
        (tmp_path / f"step-{step:08}").mkdir()
    prune_folders(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000020"]


def test_what_an_attempt_left_unfinished_is_swept(tmp_path: Path) -> None:
    FolderWriter(tmp_path / "checkpoints" / "step-1").write("model-0000-0000.part", b"x")
    (tmp_path / "checkpoints" / "step-0").mkdir()
    sweep_partial(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0"]
    assert finished_folders(tmp_path / "checkpoints") == [tmp_path / "checkpoints" / "step-0"]
    assert finished_folders(tmp_path / "nowhere") == []


def test_a_folder_that_was_being_replaced_is_kept(tmp_path: Path) -> None:
    """A process may end after it moved the earlier folder away and before it put the new one in place."""
    models = tmp_path / "models"
    for name in (".moved.old", ".replaced.old", "replaced", ".moved.partial"):
        (models / name).mkdir(parents=True)
        (models / name / "from").write_text(name)
    sweep_partial(tmp_path)
    assert {path.name: (path / "from").read_text() for path in models.iterdir()} == {
        "moved": ".moved.old",
        "replaced": "replaced",
    }


def test_every_file_has_a_checksum(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").touch()
    writer = FolderWriter(tmp_path / "out")
    for stem in ("model", "adapter_model", "optimizer"):
        for number in range(2):
            for piece in stream_file({f"{stem}{number}": torch.rand(600, 1000)}):
                writer.write(f"{stem}-0000-{number:04}.part", piece)
    writer.write_json("tokenizer.json", "is replaced")
    writer.copy([tmp_path / "tokenizer.json", tmp_path / "empty"])
    writer.finish()
    said = json.loads((tmp_path / "out" / "checksums.json").read_text())["files"]
    assert said.keys() == {path.name for path in (tmp_path / "out").iterdir()} - {"checksums.json"}
    assert {"model-00002-of-00002.safetensors", "adapter_model.safetensors", "empty"} <= said.keys()
    assert damage(tmp_path / "out") is None


@pytest.mark.parametrize("kind", ["flipped", "cut", "grown", "gone", "checksums-cut", "checksums-flipped"])
def test_any_damage_is_found_and_named(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "out"
    write_folder(folder, {"a": torch.rand(700, 1000)})
    name = "checksums.json" if kind.startswith("checksums") else "model.safetensors"
    file = folder / name
    content = bytearray(file.read_bytes())
    if kind.endswith("flipped"):
        content[-20 if name == "checksums.json" else 2_000_000] ^= 1
    elif kind == "grown":
        content += b"x"
    else:
        content = content[:-1000] if kind == "cut" else content[:20]
    file.write_bytes(content)
    if kind == "gone":
        file.unlink()
    found = damage(folder)
    assert found is not None
    assert str(folder) in found
    if kind != "checksums-flipped":
        assert name in found


def test_a_folder_of_an_earlier_version_counts_as_whole(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", {"a": torch.ones(2)})
    (tmp_path / "out" / "checksums.json").unlink()
    assert damage(tmp_path / "out") is None


def test_a_folder_that_is_renamed_as_damaged_is_kept_but_counts_no_more(tmp_path: Path) -> None:
    for step in (1, 2):
        write_folder(tmp_path / f"step-{step}", {"a": torch.ones(step)})
    for _ in range(2):
        assert rename_damaged(tmp_path / "step-2") == tmp_path / ".step-2.damaged"
        assert finished_folders(tmp_path) == [tmp_path / "step-1"]
        assert (tmp_path / ".step-2.damaged" / "model.safetensors").exists()
        write_folder(tmp_path / "step-2", {"a": torch.ones(2)})
