"""Weight folders: single tensors read, pieces written, nothing half-written shown."""

import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from share_compute.errors import Unavailable, UserError
from share_compute.models.weights import (
    FolderWriter,
    WeightFolder,
    copy_into,
    pack,
    pieces,
    prune_folders,
    unpack,
)


def test_pieces_cover_all_tensors_within_the_limit() -> None:
    tensors = {f"t{index}": torch.rand(10) for index in range(7)} | {"large": torch.rand(100)}
    groups = list(pieces(tensors, limit_bytes=100))
    assert [name for group in groups for name in group] == list(tensors)
    assert all(sum(tensor.nbytes for tensor in group.values()) <= 100 or len(group) == 1 for group in groups)


def test_a_folder_in_pieces_reads_like_one_file(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.rand(3, index + 1) for index in range(4)}
    writer = FolderWriter(tmp_path / "out")
    for number, group in enumerate(pieces(tensors, limit_bytes=30)):
        writer.write(f"model-0000-{number:04}.part", pack(group))
    assert not (tmp_path / "out").exists()
    size = writer.finish()
    assert size == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    folder = WeightFolder(tmp_path / "out")
    assert folder.names() == sorted(tensors)
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())
    assert torch.equal(unpack(folder.pack("t2"))["t2"], tensors["t2"])


def test_one_piece_has_the_plain_name(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "out")
    writer.write("model-0000-0000.part", pack({"a": torch.ones(2)}))
    writer.finish()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], torch.ones(2))


def test_finishing_replaces_an_older_folder(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        writer = FolderWriter(tmp_path / "out")
        writer.write("model-0000-0000.part", pack({"a": torch.full((2,), value)}))
        writer.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert WeightFolder(tmp_path / "out").read("a")[0] == 2.0


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    writer = FolderWriter(tmp_path / "out")
    child = os.fork()
    if child == 0:  # the limit holds for the whole process, so it is tried in one of its own
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            writer.write("model-0000-0000.part", b"x" * 5000)
        except Unavailable as failure:
            os._exit(0 if failure.mend and "disk" in failure.mend else 2)
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
    writer = FolderWriter(tmp_path / "out")
    writer.write("model-0000-0000.part", pack({"a": torch.ones(2)}))
    writer.finish()
    with pytest.raises(UserError, match="no tensor 'b'"):
        WeightFolder(tmp_path / "out").read("b")
    with pytest.raises(UserError, match="shape"):
        copy_into(torch.ones(3), torch.ones(2))


def test_pruning_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 20, 3):
        (tmp_path / f"step-{step:08}").mkdir()
    prune_folders(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000020"]
