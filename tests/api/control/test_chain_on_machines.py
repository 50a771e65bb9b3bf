"""A job on a real machine that trains, then serves its result, which answers rows and requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from openai import OpenAI
from tests.api.speaking import TEXT
from transformers import AutoModelForCausalLM, AutoTokenizer

from share_compute.lifecycle.states import JobState

pytestmark = [pytest.mark.slow, pytest.mark.exact]
PROMPTS = ("the quick brown", "Grüße aus", "東京")
TOKENS = 8


def greedy(folder: Path, prompt: str) -> str:
    """Return the answer of transformers to a prompt."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    whole = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(
        whole[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def test_a_result_is_served_and_answers_rows(
    server: Any, contributors: Callable[[], Any], tmp_path: Path, wait_for: Any
) -> None:
    contributors()
    (tmp_path / "corpus.txt").write_text(TEXT * 200)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in PROMPTS))
    job = {
        "name": "chained",
        "model": {
            "config": {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
                       "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
        },
        "tokenizer": {"vocab_size": 300},
        "data": {"files": [str(tmp_path / "corpus.txt")]},
        "training": {"steps": 20, "batch_size": 8, "sequence_length": 32, "optimizer": {"learning_rate": 0.01}},
        "then": {
            "serve": {"name": "chained", "max_seq": 64},
            "generate": {
                "data": {"files": [str(tmp_path / "rows.jsonl")], "prompt": "question"},
                "sampling": {"max_tokens": TOKENS, "temperature": 0},
            },
        },
    }  # fmt: skip
    with (
        server.client() as client,
        OpenAI(base_url=f"{server.url}/v1", api_key=server.api_key, max_retries=0, timeout=240) as openai,
    ):
        job_id = client.submit(job).id

        def over(one: str) -> Any:
            found = client.job(one)
            return found if found.state.is_final else None

        trained = wait_for(lambda: over(job_id), "the training")
        assert trained.state is JobState.succeeded, trained.reason
        wait_for(lambda: len([link for link in client.job(job_id).links if link.started]) == 2, "both links")
        links = {link.name: link for link in client.job(job_id).links}
        batch = wait_for(lambda: over(links["generate"].started), "the batch")
        assert batch.state is JobState.succeeded, batch.reason

        answers = client.download(batch.id, "output", tmp_path / "answers")
        rows = [json.loads(line) for line in (answers / "output.jsonl").read_text().splitlines()]
        model = client.download(job_id, "model", tmp_path / "trained")
        assert [(row["question"], row["output"]) for row in rows] == [
            (prompt, greedy(model, prompt)) for prompt in PROMPTS
        ]
        answer = openai.completions.create(
            model="chained", prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0
        )
        assert answer.choices[0].text == rows[0]["output"]

        card = ModelCard.load(model / "README.md")
        assert card.data.to_dict()["pipeline_tag"] == "text-generation"
        assert "| 20 |" in card.text
        assert "| 1 | cpu |" in card.text
        client.undeploy("chained")
