"""Facts about folders: which failures are kept, and how many folders wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from share_compute.errors import Busy, ShareComputeError, Unavailable, UserError
from share_compute.files.folder_facts import FolderFacts
from share_compute_api.catalogue.facts import FactsReader, Found

FACTS = FolderFacts(kind="generate", architecture="A", parameters=1, weights_bytes=2, has_chat_template=False)
WAIT_S = 60.0


class Answers:
    """Answers with the facts, or fails as set, when `gate` is set."""

    def __init__(self) -> None:
        self.failure: ShareComputeError | None = None
        self.asked: list[str] = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.now_s = 0.0

    def ask(self, question: Any) -> Any:
        self.asked.append(question.folder.name)
        self.begun.set()
        assert self.gate.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        return FACTS


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def reader(answers: Answers) -> Iterator[FactsReader]:
    reader = FactsReader(answers, clock=lambda: answers.now_s)
    yield reader
    answers.gate.set()
    reader.close()


@pytest.fixture
def folders(tmp_path: Path) -> Callable[[int], list[Path]]:
    def make(number: int) -> list[Path]:
        made = [tmp_path / f"{place:03}" for place in range(number)]
        for folder in made:
            folder.mkdir()
        return made

    return make


def read(reader: FactsReader, folders: list[Path], wait_s: float = WAIT_S) -> list[Found]:
    return list(reader.read(dict.fromkeys(folders, lambda: None), wait_s).values())


def test_a_folders_own_failure_is_kept_until_it_changes(
    reader: FactsReader, answers: Answers, folders: Callable[[int], list[Path]]
) -> None:
    (folder,) = folders(1)
    answers.failure = UserError("no config.json", hint="add it")
    assert read(reader, [folder]) == [answers.failure]
    answers.now_s = 1e6
    read(reader, [folder])
    assert len(answers.asked) == 1
    (folder / "config.json").touch()
    answers.failure = None
    assert read(reader, [folder]) == [FACTS]


@pytest.mark.parametrize(("code", "what"), [("too_much_time", "time"), ("too_much_memory", "memory")])
def test_a_limit_is_shown_and_the_folder_is_read_again_later(
    reader: FactsReader, answers: Answers, folders: Callable[[int], list[Path]], code: str, what: str
) -> None:
    (folder,) = folders(1)
    answers.failure = UserError("too much", hint="send less", details={"code": code})
    (found,) = read(reader, [folder])
    assert isinstance(found, UserError)
    assert found.message == f"reading the folder took too much {what}"
    assert "send less" not in str(found.hint)
    answers.failure = None
    assert isinstance(read(reader, [folder])[0], UserError)
    answers.now_s = 30.0
    assert read(reader, [folder]) == [FACTS]


@pytest.mark.parametrize("kind", [Busy, Unavailable])
def test_a_busy_server_is_asked_again(
    reader: FactsReader, answers: Answers, folders: Callable[[int], list[Path]], kind: type[ShareComputeError]
) -> None:
    (folder,) = folders(1)
    answers.failure = kind("too much to do", hint="wait", details={"retry_after_s": 1})
    assert read(reader, [folder]) == [None]
    answers.failure = None
    assert read(reader, [folder]) == [FACTS]


def test_a_call_queues_few_folders_and_shows_all_that_are_known(
    reader: FactsReader, answers: Answers, folders: Callable[[int], list[Path]]
) -> None:
    *many, known = folders(251)
    assert read(reader, [known]) == [FACTS]
    answers.gate.clear()
    assert read(reader, [*many, known], 0.0) == [*[None] * 250, FACTS]
    answers.gate.set()
    assert read(reader, many[:200]) == [FACTS] * 200
    assert len(answers.asked) == 201
    assert read(reader, many) == [FACTS] * 250
    assert sorted(answers.asked) == sorted(folder.name for folder in (*many, known))


def test_a_changed_folder_does_not_wait_twice(
    reader: FactsReader, answers: Answers, folders: Callable[[int], list[Path]]
) -> None:
    first, second = folders(2)
    answers.gate.clear()
    answers.begun.clear()
    assert read(reader, [first, second], 0.0) == [None, None]
    assert answers.begun.wait(WAIT_S)
    for number in range(3):
        (second / str(number)).touch()
        assert read(reader, [second], 0.0) == [None]
    answers.gate.set()
    assert read(reader, [first, second]) == [FACTS, FACTS]
    assert answers.asked == [first.name, second.name]
