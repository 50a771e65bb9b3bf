"""The Python client resumes broken answers by itself, and cancels the answers that its caller closes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.conftest import Plane, wait_until
from tests.api.speaking import Speaker, make_tokenizer

from share_compute.errors import Gone, Unavailable
from share_compute_api.client.client import Client
from share_compute_api.workers.isolated.tokenizer import ServedTokenizer

ANSWER = "the quick brown fox is in 東京 😀 and Grüße aus München"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def speaker(plane: Plane, folder: Path) -> Speaker:
    tokenizer = ServedTokenizer(folder)
    speaker = Speaker(
        "poet", folder, lambda _: (*tokenizer.encode(ANSWER, 99), *tokenizer.vocabulary.end_ids)
    )
    plane.app.state.context.engines.add(speaker)
    return speaker


def begun(answer: Iterator[str]) -> list[str]:
    return [next(answer), next(answer)]


def test_an_answer_outlives_the_server(plane: Plane, client: Client, speaker: Speaker) -> None:
    speaker.pause_after = 8
    answer = client.chat("poet", HELLO, max_tokens=99)
    pieces = begun(answer)
    plane.server.stop()
    reading = threading.Thread(target=lambda: pieces.extend(answer))
    reading.start()
    speaker.pause_after = None
    plane.start_again(lambda: plane.app.state.context.engines.add(speaker))
    reading.join()
    assert "".join(pieces) == ANSWER


def test_the_client_gives_up_with_a_hint(plane: Plane, client: Client, speaker: Speaker) -> None:
    speaker.pause_after = 8
    for resume_s in (0.0, 0.5):
        answer = client.complete("poet", "x", max_tokens=99, resume_s=resume_s)
        begun(answer)
        plane.app.state.context.notifier.close()
        if resume_s:
            plane.server.stop()
        with pytest.raises(Unavailable, match="the answer broke off") as caught:
            list(answer)
        assert "share-compute up" in (caught.value.hint or "")
        if not resume_s:
            plane.restart()
            plane.app.state.context.engines.add(speaker)
    plane.start_again()


def test_an_expired_stream_is_reported(plane: Plane, client: Client, speaker: Speaker) -> None:
    speaker.pause_after = 8
    answer = client.complete("poet", "x", max_tokens=99)
    begun(answer)
    plane.restart()  # the model is no longer served
    with pytest.raises(Gone, match="not served any more"):
        list(answer)


def test_closing_an_answer_cancels_it(client: Client, speaker: Speaker) -> None:
    speaker.pause_after = 8
    answer = client.complete("poet", "x", max_tokens=99)
    begun(answer)
    answer.close()  # type: ignore[attr-defined]
    wait_until(lambda: speaker.closed)
