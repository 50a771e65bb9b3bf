"""Processes that read submitters' files: their answers, their limits, and requests that wait for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.api.conftest import DEADLINE_S, wait_until
from tests.api.speaking import make_tokenizer

from share_compute.errors import Busy, TooLong, Unavailable, UserError
from share_compute_api.submission.layer_checks import check_divided
from share_compute_api.workers.isolated.kept import MOST_KEPT, Kept
from share_compute_api.workers.isolated.messages import (
    Chat,
    CheckSchema,
    Describe,
    Encode,
    TemplateOptions,
)
from share_compute_api.workers.isolated.pool import IsolatedProcesses, PoolLimits
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HELLO = ({"role": "user", "content": "Hello"},)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def processes() -> Iterator[IsolatedProcesses]:
    pool = IsolatedProcesses(PoolLimits(processes=1, time_s=DEADLINE_S, load_s=DEADLINE_S))
    yield pool
    pool.close()


def test_answers_are_those_of_the_tokenizer_itself(
    processes: IsolatedProcesses, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inside = ServedTokenizer(folder)
    assert processes.ask(Describe(folder=folder, version=1)) == inside.vocabulary
    encoded = processes.ask(Encode(folder=folder, version=1, texts=("fox", "東京 😀"), window_tokens=99))
    assert encoded.texts == tuple(inside.encode(text, 99) for text in ("fox", "東京 😀"))
    chat = processes.ask(Chat(folder=folder, version=1, messages=HELLO, window_tokens=99))
    plain = inside.chat(HELLO, TemplateOptions())
    assert chat.texts == (inside.encode(plain, 99, is_chat=True),)
    assert capfd.readouterr().err == ""  # transformers advises to install torch


def test_a_template_gets_the_options_of_the_request(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<answer>{% endif %}{{ enable_thinking }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ServedTokenizer(tmp_path)
    messages = ({"role": "user", "content": "fox"}, {"role": "assistant", "content": "lazy"})

    def text(**options: Any) -> str:
        return tokenizer.chat(messages, TemplateOptions(**options))

    assert text() == "<user>fox<assistant>lazy<answer>"
    assert text(variables={"enable_thinking": False}).endswith("<answer>False")
    assert text(add_generation_prompt=False) == "<user>fox<assistant>lazy"
    continued = text(
        add_generation_prompt=False, continue_final_message=True, variables={"enable_thinking": 1}
    )
    assert continued == "<user>fox<assistant>lazy"
    for taken in ("chat_template", "tokenize", "messages", "tools"):
        with pytest.raises(UserError, match=f"chat_template_kwargs.{taken} is no variable") as caught:
            text(variables={taken: "x"})
        assert caught.value.details["param"] == "chat_template_kwargs"


def test_errors_come_as_they_were_raised(processes: IsolatedProcesses, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TooLong) as caught:
        processes.ask(Encode(folder=folder, version=1, texts=("fox " * 9,), window_tokens=2))
    assert caught.value.details == {"window_tokens": 2}
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be loaded"):
        processes.ask(Describe(folder=tmp_path, version=1))
    with pytest.raises(UserError, match="cannot be followed"):
        processes.ask(CheckSchema(text='{"type": "nonsense"}', owner=""))


def test_a_process_that_was_killed_while_idle_fails_no_question(
    processes: IsolatedProcesses, folder: Path
) -> None:
    question = Encode(folder=folder, version=1, texts=("fox",), window_tokens=99)
    before = processes.ask(question)
    (pid,) = processes.pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not processes.pids())
    assert processes.ask(question) == before
    assert processes.pids() != [pid]


def test_another_process_follows_one_that_was_killed_at_work(
    processes: IsolatedProcesses, folder: Path, tmp_path: Path
) -> None:
    endless = make_tokenizer(tmp_path)
    (endless / "chat_template.jinja").write_text(ENDLESS)
    processes.ask(Describe(folder=endless, version=1))
    (pid,) = processes.pids()
    before_s = psutil.Process(pid).cpu_times().user
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(
            processes.ask, Chat(folder=endless, version=1, messages=HELLO, window_tokens=99)
        )
        wait_until(lambda: psutil.Process(pid).cpu_times().user > before_s + 0.2)  # the template is endless
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="was killed"):
            answer.result()
    question = Encode(folder=folder, version=1, texts=("fox",), window_tokens=99)
    assert processes.ask(question).texts
    assert processes.pids() != [pid]


@pytest.mark.slow
def test_a_question_behind_too_many_is_refused(folder: Path, tmp_path: Path) -> None:
    limits = PoolLimits(processes=1, time_s=5.0, load_s=DEADLINE_S, waiting_per_source=1)
    endless = make_tokenizer(tmp_path)
    (endless / "chat_template.jinja").write_text(ENDLESS)
    question = Chat(folder=endless, version=1, messages=HELLO, window_tokens=99)
    with closing(IsolatedProcesses(limits)) as processes, ThreadPoolExecutor(2) as executor:
        processes.ask(Describe(folder=folder, version=1))
        answers = [executor.submit(processes.ask, question) for _ in range(2)]
        other = Encode(folder=folder, version=1, texts=("fox",), window_tokens=99)
        wait_until(lambda: processes.waiting == 1)
        with pytest.raises(Busy) as caught:
            processes.ask(question)
        assert caught.value.retry_after_s > 0
        assert processes.ask(other).texts  # another model has its own queue
        for one in answers:
            with pytest.raises(UserError, match="took more than 5 s"):
                one.result()


def test_questions_that_wait_when_the_server_ends_are_refused(tmp_path: Path) -> None:
    processes = IsolatedProcesses(PoolLimits(processes=1))
    endless = make_tokenizer(tmp_path)
    (endless / "chat_template.jinja").write_text(ENDLESS)
    question = Chat(folder=endless, version=1, messages=HELLO, window_tokens=99)
    processes.ask(Describe(folder=endless, version=1))
    with ThreadPoolExecutor(2) as executor:
        answers = [executor.submit(processes.ask, question) for _ in range(2)]
        wait_until(lambda: processes.waiting == 1)
        processes.close()
        for one in answers:
            with pytest.raises(Unavailable, match="the server ends"):
                one.result()
    assert processes.pids() == []


def test_questions_about_layers_are_asked_once(processes: IsolatedProcesses) -> None:
    config = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    for _ in range(2):  # from memory, the second time
        with pytest.raises(UserError, match="no plan for architecture 'phi3'") as refused:
            check_divided(2, config, processes)
        assert refused.value.details["fields"][0]["field"] == "parallelism.tensor"
        assert refused.value.hint
        assert processes.pids() == []  # a process with torch takes much memory, and ends
    check_divided(1, config, processes)


def test_the_tokenizers_that_were_used_last_are_kept() -> None:
    kept: Kept[str] = Kept()
    for number in range(MOST_KEPT):
        kept.put(Path(str(number)), 1, str(number))
    assert kept.get(Path("0"), 1) == "0"
    assert kept.get(Path("0"), 2) is None
    kept.put(Path("new"), 1, "new")
    assert kept.get(Path("1"), 1) is None
    assert kept.get(Path("0"), 1) == "0"
    kept.forget(Path("0"))
    assert kept.get(Path("0"), 1) is None
    kept.forget(Path("0"))
