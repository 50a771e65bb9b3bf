"""Tokenizer of a served model: converts texts and conversations to token ids.

Tokenizers run only in isolated processes, because tokenizer files and chat templates are untrusted. A normalizer may
lengthen a text by a factor of a million, and a template may never end.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from share_compute.data.tokenization import load_tokenizer
from share_compute.errors import UserError
from share_compute.specification.serve import ToolFormat
from share_compute_api.workers.isolated.messages import TemplateOptions
from share_compute_api.workers.isolated.vocabulary import (
    MOST_TOKEN_CHARACTERS,
    MOST_TOKENS,
    Vocabulary,
    too_long,
)

NO_CHAT_TEMPLATE = "no_chat_template"
"""Error code that tells clients to use `/v1/completions` instead."""
_SHOWN_CHARACTERS = 300
"""Number of characters after which `shortened` cuts a message. Messages of templates and libraries are untrusted."""


class ServedTokenizer:
    """Converts prompts to token ids.

    Args:
        folder: a Hugging Face folder.

    Raises:
        UserError: the folder has no tokenizer that can be loaded.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = _load(folder)
        self._fast = self._tokenizer.backend_tokenizer
        # A prompt must be neither truncated nor padded. If it is too long, `encode` raises an error.
        self._fast.no_truncation()
        self._fast.no_padding()
        self._ids = self._fast.get_vocab(with_added_tokens=True)
        self._most_characters_per_token = _longest(self._ids) if _keeps_all(self._fast) else None

    def encode(self, text: str, most_tokens: int, *, is_chat: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text.

        Args:
            text: a client's text.
            most_tokens: the model's context window, in tokens.
            is_chat: whether the text was formatted by `chat`, which adds all special tokens itself.

        Raises:
            TooLong: the text has more than ``most_tokens`` tokens; for very long texts the error has no exact count.
            UserError: the text has no tokens.
        """
        most = self._most_characters_per_token
        if most is not None and len(text) > most_tokens * most:
            raise too_long(f"more than {most_tokens}", most_tokens)
        (encoded,) = self._fast.encode_batch_fast([text], add_special_tokens=not is_chat)
        ids: list[int] = encoded.ids
        if len(ids) > most_tokens:
            raise too_long(str(len(ids)), most_tokens)
        if not ids:
            raise UserError("the prompt has no tokens", hint="send some text")
        return tuple(ids)

    def chat(self, messages: Sequence[dict[str, Any]], options: TemplateOptions) -> str:
        """Format a conversation with the chat template, and return the text.

        Raises:
            UserError: the tokenizer has no chat template, the template rejects these messages or does not show the
                tools, or a variable has the name of a parameter of ``apply_chat_template``.
        """
        if self._tokenizer.chat_template is None:
            raise UserError(
                "this model's tokenizer has no chat template",
                hint="use /v1/completions, or put a chat_template.jinja into the model's folder and deploy it again",
                details={"param": "messages", "code": NO_CHAT_TEMPLATE},
            )
        # A variable with the name of a parameter could replace the template or change the result.
        parameters = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages"}
        if taken := sorted(parameters & options.variables.keys()):
            raise UserError(
                f"chat_template_kwargs.{taken[0]} is no variable of a chat template",
                hint="leave it out",
                details={"param": "chat_template_kwargs", "code": "invalid_value"},
            )
        text = self._formatted(messages, options)
        if options.tools and self._ignores_tools(messages, options, text):
            raise UserError(
                "the model's chat template does not show tools to the model",
                hint="leave tools out, or deploy a model whose chat template has the variable tools",
                details={"param": "tools", "code": "unsupported_parameter"},
            )
        return text

    def _ignores_tools(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions, with_tools: str
    ) -> bool:
        try:
            return self._formatted(messages, options.model_copy(update={"tools": ()})) == with_tools
        except UserError:
            return False  # the template needs the tools

    def _formatted(self, messages: Sequence[dict[str, Any]], options: TemplateOptions) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(options.tools) or None,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tokenize=False,
                **options.variables,
            )
        except MemoryError:
            raise
        except Exception as failure:
            # The template is untrusted code and may raise any exception.
            refused = "messages with tools" if options.tools else "messages"
            raise UserError(
                f"the model's chat template refuses these {refused}: {shortened(failure)}",
                hint="most templates want user and assistant in turn, with system at most once, first",
            ) from failure
        return text

    @property
    def tool_format(self) -> ToolFormat | None:
        """Format of tool calls that the chat template uses; None if it uses no known format."""
        templates = self._tokenizer.chat_template
        if isinstance(templates, dict):  # transformers takes "tool_use" for requests with tools
            templates = templates.get("tool_use") or templates.get("default")
        return _tool_format(templates or "")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, which decodes tokens to text.

        Raises:
            UserError: the vocabulary is too large, or the control plane does not support its decoder.
        """
        size = max(self._ids.values(), default=-1) + 1
        added = self._fast.get_added_tokens_decoder()
        if size > MOST_TOKENS:
            raise self._refused(f"has token id {size - 1}", f"ids below {MOST_TOKENS} are read")
        if (longest := _longest(self._ids)) > MOST_TOKEN_CHARACTERS:
            raise self._refused(
                f"has a token of {longest} characters", f"at most {MOST_TOKEN_CHARACTERS} are read"
            )
        tokens: list[str | None] = [None] * size
        for token, id_ in self._ids.items():
            tokens[id_] = token
        for id_, token in added.items():
            tokens[id_] = token.content
        decoder = self._fast.decoder
        try:
            return Vocabulary.model_validate(
                {
                    "tokens": tokens,
                    "added": list(added),
                    "special": [id_ for id_, token in added.items() if token.special],
                    "end_ids": _end_ids(self._folder, self._tokenizer.eos_token_id),
                    "decoder": json.loads(decoder.__getstate__()) if decoder else None,
                    "tool_format": self.tool_format,
                }
            )
        except ValidationError as failure:
            first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise self._refused(
                f"is not one that this server runs: {where}: {first['msg']}",
                "decoders with regular expressions, or that make text much longer, are not run",
            ) from failure

    def _refused(self, problem: str, limit: str) -> UserError:
        return UserError(
            f"the tokenizer in {self._folder} {shortened(problem)}",
            hint=f"{limit}; use the model's published tokenizer",
        )


def largest_id(file: Path) -> int | None:
    """Return the largest token id in a ``tokenizer.json``; None if the file has no tokens.

    Raises:
        UserError: the file cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_file(os.fspath(file)).get_vocab()
    except MemoryError:
        raise
    except Exception as failure:  # the library raises bare Exception for every file that it cannot read
        raise UserError(
            f"tokenizer.json cannot be read: {shortened(failure)}", hint="save the tokenizer again"
        ) from failure
    return max(vocabulary.values(), default=None)


def shortened(said: object) -> str:
    """Return the beginning of a message from a library or a template, on one line."""
    text = " ".join(str(said)[: 4 * _SHOWN_CHARACTERS].split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _load(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    # The library warns that the folder names another tokenizer class. The warning is harmless: all classes read the
    # same file.
    noisy = transformers_logging.get_logger("transformers.tokenization_utils_base")
    noisy.setLevel(logging.ERROR)
    try:
        return PreTrainedTokenizerFast.from_pretrained(os.fspath(folder), local_files_only=True)
    except MemoryError:
        raise
    except Exception as failure:  # the library raises bare Exception for every file that it cannot read
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded: {shortened(failure)}",
            hint="save it again with save_pretrained",
        ) from failure


def _tool_format(template: str) -> ToolFormat | None:
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM write XML between these marks.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    is_llama = "<|python_tag|>" in template or ('{"name": ' in template and '"parameters": ' in template)
    return "llama" if is_llama else None


def _longest(vocabulary: Iterable[str]) -> int:
    return max(map(len, vocabulary), default=1)


def _keeps_all(tokenizer: Any) -> bool:
    """Return True only if a tokenizer certainly never replaces text with an unknown token.

    One unknown token can stand for text of any length. A long text may then have few tokens.
    """
    model = tokenizer.model
    return type(model).__name__ == "BPE" and (model.unk_token is None or model.byte_fallback)


def _end_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """Return the ids of the end-of-text tokens, from the tokenizer and the model's configuration."""
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # each of these files is optional
        ends = config.get("eos_token_id") if isinstance(config, dict) else None
        found += [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
        if found and ends is not None:
            break
    return tuple(dict.fromkeys(found))
