"""Files and variables that the server passes to a head that runs as another user."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from share_compute.settings import Settings
from share_compute_actors.machine import head
from share_compute_actors.machine.confine import Policy, User
from share_compute_actors.machine.head import hand_over, show

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def user() -> User:
    entry = pwd.getpwnam("nobody")
    return User(entry.pw_name, entry.pw_uid, entry.pw_gid)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may pass, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o711)
        yield Path(made)


def tree(folder: Path, outside: Path) -> Path:
    """Make a private folder with files, and with links to a file and to a folder outside."""
    made = folder / "tree"
    for file in (made / "file", made / "inner/file", outside / "file"):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text("content")
        file.chmod(0o600)
    (made / "link").symlink_to(outside / "file")
    (made / "inner/link").symlink_to(outside)
    return made


def facts(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid, found.st_mode


def can(user: User, *command: str | Path) -> bool:
    """Return whether a command succeeds as this user."""
    return (
        subprocess.run(
            command, user=user.uid, group=user.gid, extra_groups=[], capture_output=True, check=False
        ).returncode
        == 0
    )


def test_what_is_handed_over_can_be_changed_and_links_are_not_followed(folder: Path, user: User) -> None:
    outside = folder / "outside"
    given = tree(folder, outside)
    before = [facts(path) for path in (outside, outside / "file")]
    assert not can(user, "cat", given / "file")
    hand_over(Policy(user=user), [given])
    for path in (given, *given.rglob("*")):
        assert facts(path)[:2] == (user.uid, user.gid), path
    assert can(user, "rm", given / "inner/file")
    assert can(user, "touch", given / "inner/new")
    assert [facts(path) for path in (outside, outside / "file")] == before
    assert not can(user, "cat", given / "link")


def test_nothing_is_handed_over_below_a_link(folder: Path, user: User) -> None:
    outside = folder / "outside"
    tree(folder, outside)
    (folder / "way").symlink_to(outside)
    before = facts(outside / "file")
    with pytest.raises(OSError, match="in its path is a link"):
        hand_over(Policy(user=user), [folder / "way/file"])
    assert facts(outside / "file") == before


def test_what_is_shown_can_be_read_and_not_changed(folder: Path, user: User) -> None:
    outside, below = folder / "outside", folder / "below"
    below.mkdir(mode=0o700)
    (below / "batch").mkdir(mode=0o700)
    given = tree(below / "batch", outside)
    beside = below / "batch/beside"
    beside.write_text("private")
    beside.chmod(0o600)
    before = [facts(path) for path in (outside, outside / "file", beside)]
    show(Policy(user=user), [given], below)
    assert can(user, "cat", given / "file", given / "inner/file")
    assert can(user, "ls", given, given / "inner")
    for path in (below, below / "batch"):
        assert not can(user, "ls", path)
    for command in (
        ["touch", given / "new"],
        ["truncate", "--size=0", given / "file"],
        ["rm", given / "file"],
    ):
        assert not can(user, *command)
    assert not can(user, "cat", beside)
    assert not can(user, "cat", given / "link")
    assert [facts(path) for path in (outside, outside / "file", beside)] == before


def test_nothing_changes_where_the_head_is_no_other_user(folder: Path) -> None:
    given = tree(folder, folder / "outside")
    before = {path: facts(path) for path in (folder, given, *given.rglob("*"))}
    hand_over(Policy(), [given])
    show(Policy(), [given], folder)
    assert {path: facts(path) for path in before} == before


def test_the_head_reaches_its_own_folders_and_no_secret(
    folder: Path, user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "unprivileged_user", lambda _name, _paths: (user, ""))
    data_folder = folder / "data"
    upload = data_folder / "uploads/upload/file"
    for private in (upload, data_folder / "ray-token"):
        private.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        private.write_text("content")
        private.chmod(0o600)
    run_folder = folder / "runs/run"
    run_folder.mkdir(parents=True, mode=0o700)
    policy = head.head_policy(Settings(data_folder=data_folder), run_folder, data_folder / "ray-tables")
    assert policy.user == user
    for path in (*map(Path, policy.write), Path(policy.home)):
        assert can(user, "touch", path / "new"), path
    assert can(user, "cat", upload)
    assert not can(user, "cat", data_folder / "ray-token")
    assert not can(user, "ls", data_folder)
    assert not can(user, "touch", data_folder / "new")
    assert not can(user, "touch", data_folder / "batches/new")
