"""Profiles on disk: found again for equal inputs, and made again when a file or a library changed."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

import pytest

from share_compute.errors import UserError
from share_compute.models.profiles import cache
from share_compute.models.profiles.profile import LayerProfile, ModelProfile, QuadraticGrowth

PROFILE = ModelProfile(
    layers=(LayerProfile(parameters=7, forward_flops=QuadraticGrowth(0.1, 2.5, 1e-9)),), no_cut_reason="none"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "share-compute" / "profiles"


def never() -> ModelProfile:
    pytest.fail("the profile is known")


def test_a_profile_is_found_again(folder: Path) -> None:
    assert cache.stored_profile({"a": 1}) is None
    assert cache.cached_profile({"a": 1, "b": 2}, lambda: PROFILE) == PROFILE
    assert cache.cached_profile({"b": 2, "a": 1}, never) == PROFILE
    assert cache.stored_profile({"a": 1, "b": 3}) is None
    assert len(list(folder.iterdir())) == 1


@pytest.mark.usefixtures("folder")
def test_another_version_of_a_library_makes_the_profile_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.cached_profile("facts", lambda: PROFILE)
    monkeypatch.setattr(cache, "version", lambda _: "newer")
    assert cache.stored_profile("facts") is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff", b'{"layers": 3}'])
def test_a_damaged_file_is_made_again(folder: Path, damage: bytes) -> None:
    cache.cached_profile("facts", lambda: PROFILE)
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert cache.cached_profile("facts", lambda: PROFILE) == PROFILE
    assert cache.stored_profile("facts") == PROFILE


@pytest.mark.usefixtures("folder")
def test_errors_are_not_stored() -> None:
    def fail() -> ModelProfile:
        raise UserError("wrong", hint="mend it")

    with pytest.raises(UserError):
        cache.cached_profile("facts", fail)
    assert cache.stored_profile("facts") is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file where the folder should be")
    assert cache.cached_profile("facts", lambda: PROFILE) == PROFILE


def test_the_number_of_files_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    for number in range(6):
        cache.cached_profile(number, lambda: PROFILE)
    assert len(list(folder.iterdir())) == 3
    assert cache.stored_profile(5) == PROFILE


def test_a_known_model_is_profiled_without_torch(folder: Path) -> None:
    folder.parent.mkdir()
    program = """
import sys
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import dissect
config = dict(model_type="llama", vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
              num_attention_heads=2, num_key_value_heads=2)
profile = dissect(Blueprint(config=config))
print("torch" in sys.modules, "transformers" in sys.modules, len(profile.layers))
"""
    outputs = [
        run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    assert [output.stdout.split() for output in outputs] == [["True", "True", "2"], ["False", "False", "2"]]
