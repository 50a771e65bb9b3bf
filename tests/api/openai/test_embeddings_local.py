"""A real encoder behind the OpenAI API: its vectors are those of ``transformers`` for each text alone."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
from openai import OpenAI
from tests.api.conftest import Plane, wait_until
from tests.api.local_engine import LocalEngine
from tests.api.speaking import TEXT, encoded, make_encoder
from transformers import PreTrainedTokenizerFast

from share_compute.errors import UserError
from share_compute.models.configuration import declared_config
from share_compute.specification import ModelSpec, parse_deployment
from share_compute_api.submission.deployments import check_deployment
from share_compute_api.submission.model_folders import model_window

pytestmark = pytest.mark.exact

TEXTS = ["the quick brown fox", TEXT, "Grüße", "東京 is far. " * 6]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(served: Plane, folder: Path) -> Iterator[LocalEngine]:
    engine = LocalEngine("bert", folder)
    served.app.state.context.engines.add(engine)
    yield engine
    engine.close()


@pytest.fixture
def client(served: Plane, engine: LocalEngine) -> Iterator[OpenAI]:
    del engine
    with OpenAI(base_url=f"{served.url}/v1", api_key=served.api_key, max_retries=0, timeout=60) as client:
        yield client


def test_vectors_are_those_of_transformers_beside_other_requests(client: OpenAI, folder: Path) -> None:
    expected = encoded(folder, TEXTS)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with ThreadPoolExecutor(4) as others:
        noise = [
            others.submit(client.embeddings.create, model="bert", input=[[5, 6, index]] * 20)
            for index in range(4)
        ]
        # The package requests base64 by default, and returns floats.
        answer = client.embeddings.create(model="bert", input=TEXTS)
        assert all(len(one.result().data) == 20 for one in noise)
    assert [one.index for one in answer.data] == [0, 1, 2, 3]
    np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=CLOSE, rtol=0)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in TEXTS)


def test_floats_base64_and_token_ids_are_the_same_vector(client: OpenAI, folder: Path) -> None:
    (expected,) = encoded(folder, TEXTS[:1])
    ids = PreTrainedTokenizerFast.from_pretrained(folder)(TEXTS[0]).input_ids
    floats = client.embeddings.create(model="bert", input=ids, encoding_format="float").data[0].embedding
    np.testing.assert_allclose(floats, expected, atol=CLOSE, rtol=0)
    packed = (
        client.embeddings.create(model="bert", input=TEXTS[0], encoding_format="base64").data[0].embedding
    )
    assert isinstance(packed, str)
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(packed), "<f4"), np.float32(floats))


def test_what_an_encoder_cannot_do_is_refused(client: OpenAI) -> None:
    assert client.models.retrieve("bert").model_dump()["kind"] == "embed"
    with pytest.raises(openai.BadRequestError, match="128"):
        client.embeddings.create(model="bert", input=[[5] * 129])
    assert len(client.embeddings.create(model="bert", input=[[5] * 128]).data[0].embedding) == 64
    assert len(client.embeddings.create(model="bert", input="fox", dimensions=64).data[0].embedding) == 64
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="bert", input="fox", dimensions=32)
    with pytest.raises(openai.BadRequestError, match="turns text into vectors"):
        client.completions.create(model="bert", prompt="fox")


def test_nothing_is_left_of_clients_that_go(client: OpenAI, engine: LocalEngine) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).embeddings.create(model="bert", input=[[5] * 128] * 200)
    wait_until(lambda: engine.stats().running == engine.stats().queued == 0)
    assert client.embeddings.create(model="bert", input="fox").data


def test_an_embedder_that_is_no_encoder_is_refused(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    config = (other / "config.json").read_text(encoding="utf-8").replace('"bert"', '"qwen3"')
    (other / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(UserError, match="'qwen3' is none of the encoders"):
        LocalEngine("other", other)


def test_how_vectors_are_made_is_checked_when_it_is_deployed(
    plane: Plane, folder: Path, tmp_path: Path
) -> None:
    made = Path(shutil.copytree(folder, tmp_path / "made"))
    spec = parse_deployment({"name": "bert", "model": {"path": str(made)}, "max_seq": 128})
    check_deployment(spec, plane.store, plane.app.state.context.isolated)
    with pytest.raises(UserError, match="max_seq: 129 tokens are more than the 128"):
        check_deployment(
            spec.model_copy(update={"max_seq": 129}), plane.store, plane.app.state.context.isolated
        )
    (made / "sentence_bert_config.json").write_text('{"max_seq_length": 32}', encoding="utf-8")
    check_deployment(
        spec, plane.store, plane.app.state.context.isolated
    )  # a request for a longer window gets it
    config = declared_config(ModelSpec(path=made))
    assert model_window(made, config) == 32
    assert model_window(made, config, is_stretched=True) == 128
    pooling = made / "1_Pooling" / "config.json"
    pooling.write_text('{"pooling_mode": "lasttoken"}', encoding="utf-8")
    with pytest.raises(UserError, match=r"model\.path: this embedder cannot be used: .* made by lasttoken"):
        check_deployment(spec, plane.store, plane.app.state.context.isolated)
