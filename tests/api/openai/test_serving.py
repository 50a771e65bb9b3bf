"""Models on real machines behind the OpenAI API give the text of transformers, and continue when a machine dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from openai import BadRequestError, OpenAI
from tests.api.speaking import TEXT, encoded, make_encoder, make_llama
from tests.conftest import descendants, served
from transformers import AutoModelForCausalLM, AutoTokenizer

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import ContributorState

pytestmark = [pytest.mark.slow, pytest.mark.exact]
PROMPT = "the quick brown fox"
TOKENS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), window=512, hidden_size=64, num_hidden_layers=4)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    whole = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(
        whole[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def members(of: int) -> list[psutil.Process]:
    """Return the members among the descendants of a process."""
    return descendants("ray::ServingMember", of)


def answer_of(openai: OpenAI) -> str:
    """Return the whole answer of the model "llama" to the prompt."""
    answer = openai.completions.create(
        model="llama", prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def test_text_goes_on_when_a_machine_dies(
    server: Any, contributors: Callable[[], Any], folder: Path, encoder: Path, expected: str, wait_for: Any
) -> None:
    with ThreadPoolExecutor() as threads:
        machines = list(threads.map(lambda _: contributors(), range(2)))
    ready = [ContributorState.ready]
    with (
        server.client() as client,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=240) as openai,
    ):
        client.deploy({"name": "llama", "model": {"path": str(folder)}, "parallelism": {"stages": 2}})
        wait_for(lambda: [model.id for model in openai.models.list()] == ["llama"], "the model")
        # A request waits for the machines.
        answer = openai.completions.create(model="llama", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
        assert expected.startswith(answer.choices[0].text)
        wait_for(lambda: served(client, "llama", 2), "both stages")
        stream = openai.completions.create(
            model="llama",
            prompt=PROMPT,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces: list[str] = []
        is_killed = False
        for chunk in stream:
            pieces += [choice.text for choice in chunk.choices]
            if not is_killed and len(pieces) > 20:
                deployed = client.deployment("llama")
                assert (deployed.state, len(deployed.plans[0].stages)) == (DeploymentState.ready, 2)
                assert {one.deployment_id for one in client.contributors(state=ready)} == {deployed.id}
                (member,) = members(machines[0].command.process.pid)
                os.kill(member.pid, signal.SIGKILL)
                is_killed = True
        assert is_killed
        assert "".join(pieces) == expected
        client.undeploy("llama")
        wait_for(lambda: not any(one.deployment_id for one in client.contributors()), "free machines")
        wait_for(lambda: not members(machines[1].command.process.pid), "the end of its member")
        assert openai.models.list().data == []

        # The same machines turn texts into vectors.
        client.deploy({"name": "bert", "model": {"path": str(encoder)}, "parallelism": {"stages": 2}})
        wait_for(lambda: served(client, "bert", 2), "both stages")
        assert [model.id for model in openai.models.list()] == ["bert"]
        texts = [TEXT, *(f"the quick brown fox and {number} lazy dogs" for number in range(60))]
        answer = openai.embeddings.create(model="bert", input=texts)
        np.testing.assert_allclose(
            [one.embedding for one in answer.data], encoded(encoder, texts), atol=1e-5, rtol=0
        )
        assert len(client.deployment("bert").plans[0].stages) == 2
        with pytest.raises(BadRequestError, match="turns text into vectors"):
            openai.completions.create(model="bert", prompt=PROMPT)
        client.undeploy("bert")


@pytest.mark.thorough
def test_no_machine_is_held_without_requests(
    server: Any, contributors: Callable[[], Any], folder: Path, expected: str, wait_for: Any
) -> None:
    machine = contributors()
    with (
        server.client() as client,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=240) as openai,
    ):
        replicas = {"min": 0, "max": 1, "downscale_to_zero_delay_s": 1, "cold_start_timeout_s": 230}
        client.deploy({"name": "llama", "model": {"path": str(folder)}, "replicas": replicas})

        def is_at_zero() -> bool:
            return client.deployment("llama").reason.startswith("no replica is up")

        def is_free() -> bool:
            return not any(one.deployment_id for one in client.contributors())

        wait_for(is_at_zero, "a deployment without a replica")
        wait_for(is_free, "a free machine")
        wait_for(lambda: not members(machine.command.process.pid), "a machine without members")
        assert client.deployment("llama").state is DeploymentState.ready
        assert [model.id for model in openai.models.list()] == ["llama"]
        # The next request is answered nevertheless.
        assert answer_of(openai) == expected
        wait_for(lambda: is_at_zero() and is_free(), "a free machine again")
        client.undeploy("llama")


@pytest.mark.thorough
def test_a_reserved_machine_keeps_its_process_without_weights(
    server: Any, contributors: Callable[[], Any], folder: Path, expected: str, wait_for: Any
) -> None:
    machine = contributors()
    with (
        server.client() as client,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=240) as openai,
    ):
        replicas = {"min": 0, "max": 1, "downscale_to_zero_delay_s": 1, "reserve": True}
        deployed = client.deploy({"name": "llama", "model": {"path": str(folder)}, "replicas": replicas})

        def stands_by() -> bool:
            counts = client.deployment("llama").replicas
            return counts is not None and (counts.standby, counts.wanted, counts.draining) == (1, 0, 0)

        for _ in range(2):
            wait_for(stands_by, "a replica on standby")
            ready = client.contributors(state=[ContributorState.ready])
            assert [one.deployment_id for one in ready] == [deployed.id]
            (member,) = members(machine.command.process.pid)
            assert answer_of(openai) == expected
            assert members(machine.command.process.pid) == [member]

        # The member's process may end meanwhile, and so may the replica's server.
        wait_for(stands_by, "a replica on standby")
        member.kill()
        for process in descendants("ray::DeploymentServer", server.command.process.pid):
            process.kill()
        assert answer_of(openai) == expected
        client.undeploy("llama")
        wait_for(lambda: not members(machine.command.process.pid), "a machine without members")


@pytest.mark.thorough
def test_replicas_share_the_requests_and_one_leaves_without_a_word(
    server: Any, contributors: Callable[[], Any], folder: Path, expected: str, wait_for: Any
) -> None:
    for _ in range(2):
        contributors()
    with (
        server.client() as client,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=240) as openai,
        ThreadPoolExecutor(12) as executor,
    ):
        client.deploy({"name": "llama", "model": {"path": str(folder)}, "replicas": 2, "max_concurrent": 4})

        def are_ready(number: int) -> bool:
            counts = client.deployment("llama").replicas
            return counts is not None and (counts.ready, counts.draining) == (number, 0)

        wait_for(lambda: are_ready(2), "two replicas")
        assert set(executor.map(answer_of, [openai] * 24)) == {expected}

        def emitted() -> list[int]:  # as of the last status
            return [status.queue.emitted_tokens for status in client.deployment_status("llama").replicas]

        wait_for(lambda: sum(emitted()) == 24 * TOKENS, "all tokens")
        assert min(emitted()) > 24 * TOKENS / 4
        asking = [executor.submit(answer_of, openai) for _ in range(24)]
        client.scale("llama", 1)
        assert {each.result() for each in asking} == {expected}
        wait_for(lambda: are_ready(1), "one replica")
        wait_for(lambda: sum(bool(one.deployment_id) for one in client.contributors()) == 1, "a free machine")
        client.undeploy("llama")
