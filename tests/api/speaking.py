"""Engines that generate the text that a test chooses, token by token, with a real tokenizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from share_compute.data.tokenization import has_chat_template
from share_compute.errors import ShareComputeError
from share_compute.inference.scheduler.events import Emitted, Finished
from share_compute.inference.scheduler.options import Generation
from share_compute.specification.serve import ToolFormat
from share_compute_api.openai.engine import ModelFacts, StreamEvent

WINDOW = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEXT = "Grüße aus München: the quick brown fox jumps over the lazy dog, and 東京 is far. "


def make_tokenizer(folder: Path, *, with_template: bool = True) -> Path:
    """Write a small byte-level tokenizer."""
    from share_compute.data.tokenization import train_tokenizer

    tokenizer = train_tokenizer([TEXT] * 3, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.eos_token = "<|end|>"
    if with_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


_MESSAGES = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOL_TEMPLATES: dict[ToolFormat, str] = {
    "hermes": "{% if tools %}<|system|>{{ tools | tojson }} Answer with <tool_call></tool_call>.<|end|>{% endif %}"
    + _MESSAGES.replace("CALL", "<tool_call>{{ call.function | tojson }}</tool_call>"),
    "llama": "{% if tools %}<|system|>{{ tools | tojson }} Answer with "
    '{"name": function, "parameters": its arguments}.<|end|>{% endif %}'
    + _MESSAGES.replace(
        "CALL",
        '{{ {"name": call.function.name, "parameters": call.function.arguments} | tojson }}',
    ),
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + _MESSAGES.replace(
        "CALL",
        "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
    ),
}
TOOL_TOKENS: dict[ToolFormat, list[str]] = {
    "hermes": [],
    "llama": ["<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
}
"""Special tokens that models of each format have."""


def make_tool_tokenizer(folder: Path, tool_format: ToolFormat, special: Sequence[str] | None = None) -> Path:
    """Write a small tokenizer with a chat template for tools."""
    from transformers import PreTrainedTokenizerFast

    make_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    own = TOOL_TOKENS[tool_format] if special is None else list(special)
    names = [*SPECIAL, "<|tool|>", *own]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = TOOL_TEMPLATES[tool_format]
    tokenizer.save_pretrained(folder)
    return folder


def make_llama(
    folder: Path, *, window: int, hidden_size: int = 32, num_hidden_layers: int = 2, vocab_size: int = 304
) -> Path:
    """Write a small Llama with random weights, and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=window,
        initializer_range=0.5,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return make_tokenizer(folder)


class Speaker:
    """An engine that answers each request with the token ids that ``ids`` returns for it."""

    def __init__(
        self, name: str, folder: Path, ids: Callable[[Generation], Sequence[int]], window: int = WINDOW
    ) -> None:
        can_chat = has_chat_template(folder)
        self.facts = ModelFacts(name, "generate", 1_700_000_000, window, folder, can_chat)
        self.ids = ids
        self.received: list[Generation] = []
        self.closed: set[int] = set()
        """Sequences that the client cancelled."""
        self.refusal: ShareComputeError | None = None
        self.failure: tuple[int, Exception] | None = None
        """(number of tokens, error): after this many tokens it fails with this error."""
        self.pause_after: int | None = None
        self.go_on = threading.Event()

    async def generate(self, generations: Sequence[Generation]) -> Speech:
        if self.refusal is not None:
            raise self.refusal
        self.received += generations
        return Speech(self, generations)


class Speech:
    """The sequences of one request; yields one token of each in turn."""

    def __init__(self, speaker: Speaker, generations: Sequence[Generation]) -> None:
        self._speaker = speaker
        self._open = {one.sequence: self._say(one, speaker.ids(one)) for one in generations}
        self._index = 0

    def _say(self, generation: Generation, ids: Sequence[int]) -> Iterator[Emitted | Finished]:
        speaker, options = self._speaker, generation.options
        for index, token in enumerate(ids[: options.max_tokens]):
            if index < len(generation.emitted):
                assert token == generation.emitted[index]
                continue
            if speaker.failure is not None and index == speaker.failure[0]:
                raise speaker.failure[1]
            num_logprobs = options.logprobs
            others = tuple((token + other, -1.0 - other) for other in range(num_logprobs or 0))
            cached = 0 if index else 3
            yield Emitted(
                generation.sequence, index, token, None if num_logprobs is None else -0.25, others, cached
            )
            if token in options.stop_token_ids:
                yield Finished(generation.sequence, "stop", index + 1)
                return
        reason: Literal["length", "stop"] = "length" if len(ids) > options.max_tokens else "stop"
        yield Finished(generation.sequence, reason, min(len(ids), options.max_tokens))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[StreamEvent]:
        if not self._open:
            raise StopAsyncIteration
        speaker = self._speaker
        while self._index == speaker.pause_after and not speaker.go_on.is_set():  # noqa: ASYNC110 - set by a thread
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        self._index += 1
        events: list[StreamEvent] = []
        for sequence, said in tuple(self._open.items()):
            event = next(said)
            if isinstance(event, Finished):
                del self._open[sequence]
            events.append(event)
        return events

    def complete(self, sequence: int) -> None:
        self._end([sequence])

    def close(self) -> None:
        self._end(tuple(self._open))

    def _end(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            if self._open.pop(sequence, None) is not None:
                self._speaker.closed.add(sequence)


class Encoder:
    """Turns texts into vectors; different texts get different vectors."""

    def __init__(self, name: str, folder: Path) -> None:
        self.facts = ModelFacts(name, "embed", 1_700_000_000, WINDOW, folder)

    async def embed(self, owner: str, prompts: Sequence[tuple[int, ...]]) -> list[list[float]]:
        assert owner.startswith(("key-", "job-"))
        return [[float(len(prompt)), float(sum(prompt)), -0.5] for prompt in prompts]


def make_encoder(folder: Path) -> Path:
    """Write a small BERT with random weights for sentence-transformers: mean pooling, normalized to length 1."""
    import json

    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    make_tokenizer(folder, with_template=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|user|>", "<|end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A <|end|>", pair="<|user|> $A <|end|> $B <|end|>", special_tokens=ends
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=304,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    BertModel(config).save_pretrained(folder)
    steps: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("Transformer", "", {}),
        ("Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True}),
        ("Normalize", "2", {}),
    )
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for kind, path, _ in steps]
    (folder / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(steps[1][2]), encoding="utf-8")
    return folder


def encoded(folder: Path, texts: Sequence[str]) -> list[list[float]]:
    """Return the vectors that transformers computes, for each text alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        means = [
            model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False))
            .last_hidden_state[0]
            .mean(0)
            for text in texts
        ]
    vectors: list[list[float]] = torch.nn.functional.normalize(torch.stack(means), dim=1).tolist()
    return vectors
