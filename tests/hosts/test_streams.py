"""Links between hosts are cut while a model streams: each stream has the text of an undisturbed one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from openai import OpenAI
from tests.api.speaking import make_llama
from tests.conftest import served, wait_for
from tests.hosts.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
NAME = "llama"
PROMPT = "the quick brown fox"
WINDOW = 2048
TOKENS = 1500


@pytest.fixture(scope="module")
def openai(cluster: Cluster) -> Iterator[OpenAI]:
    """A model in two stages, and a client of it."""
    folder = cluster.server.data_folder.with_name("data-files") / NAME
    make_llama(folder, window=WINDOW, hidden_size=64, num_hidden_layers=4)
    with (
        cluster.server.client() as client,
        OpenAI(
            base_url=f"{cluster.server.url}/v1", api_key=cluster.server.api_key, max_retries=0, timeout=240
        ) as openai,
    ):
        client.deploy({"name": NAME, "model": {"path": str(folder)}, "parallelism": {"stages": 2}})
        wait_for(lambda: served(client, NAME, 2), "both stages")
        yield openai
        client.undeploy(NAME)


def stream(openai: OpenAI, has_begun: threading.Event | None = None) -> Iterator[str]:
    """Yield the pieces of an answer; the event is set after some of them."""
    answer = openai.completions.create(
        model=NAME,
        prompt=PROMPT,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for number, chunk in enumerate(answer):
        if number == 20 and has_begun is not None:
            has_begun.set()
        yield from (choice.text for choice in chunk.choices)


@pytest.fixture(scope="module")
def undisturbed(openai: OpenAI) -> str:
    return "".join(stream(openai))


def cut_stream(openai: OpenAI, cut: AbstractContextManager[None], seconds: float) -> tuple[str, bool]:
    """Cut a link for a while during a stream; return the text, and whether the stream ended after the cut."""
    has_begun = threading.Event()

    def hold() -> None:
        assert has_begun.wait(240.0)
        with cut:
            time.sleep(seconds)

    cutting = threading.Thread(target=hold)
    cutting.start()
    text = "".join(stream(openai, has_begun))
    ended_after = not cutting.is_alive()
    cutting.join()
    return text, ended_after


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [4, 30])
def test_a_server_that_is_cut_off_loses_no_token(
    cluster: Cluster, openai: OpenAI, undisturbed: str, seconds: float
) -> None:
    cut = cluster.host.cut_from(list(cluster.machines.values()))
    assert cut_stream(openai, cut, seconds) == (undisturbed, True)


@pytest.mark.parametrize("seconds", [5, pytest.param(30, marks=pytest.mark.thorough)])
def test_a_machine_that_is_cut_off_loses_no_token(
    cluster: Cluster, openai: OpenAI, undisturbed: str, seconds: float
) -> None:
    with cluster.server.client() as client:
        deployment = wait_for(lambda: served(client, NAME, 2), "both stages")
        name = deployment.plans[0].stages[1].members[0].name
    host = cluster.machines[name]
    text, ended_after = cut_stream(openai, host.cut_from(cluster.others(host)), seconds)
    assert text == undisturbed
    # Another machine takes over the stage, so the stream may end before a long cut does.
    assert ended_after or seconds > 5
