"""A served model's tokenizer: text and chats into token ids, and ids into the bytes that they stand for.

It is read without torch where the folder has a ``tokenizer.json``, as nearly all have: the control plane stays light.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from share_compute.data.tokenization import load_tokenizer
from share_compute.errors import TooLong, UserError

_ONE_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
"""How tokenizers made from SentencePiece write a byte that has no token of its own."""
NO_CHAT_TEMPLATE = "no_chat_template"
"""Code of the error that a client may ask `/v1/completions` after."""
_SPACE = "\u2581"
"""How they write a space."""


class ServedTokenizer:
    """Reads prompts and writes tokens; may be used by several threads.

    Args:
        folder: a Hugging Face folder.

    Raises:
        UserError: it holds no tokenizer that can be loaded.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder)
        self._fast = self._tokenizer.backend_tokenizer
        # Clients are told that a prompt is too long; nothing is cut off or filled up in secret.
        self._fast.no_truncation()
        self._fast.no_padding()
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the largest token id."""
        added = self._fast.get_added_tokens_decoder()
        self._added: dict[int, str] = {id_: token.content for id_, token in added.items()}
        self._special = frozenset(id_ for id_, token in added.items() if token.special)
        decoder = self._fast.decoder.__getstate__().decode() if self._fast.decoder else ""
        self._bytes = _byte_alphabet() if '"ByteLevel"' in decoder else None
        self._writes_spaces = _SPACE in decoder or "Metaspace" in decoder
        self._most_characters_per_token = _longest(vocabulary) if _keeps_all(self._fast) else None
        self.end_ids = _end_ids(folder, self._tokenizer.eos_token_id)
        """Tokens that end a text."""

    def encode(self, text: str, most_tokens: int, *, is_chat: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text.

        Args:
            text: what a client sent.
            most_tokens: the model's window.
            is_chat: whether it was written by `chat`, which adds all special tokens itself.

        Raises:
            TooLong: it is more than ``most_tokens``; for very long texts that is told without a count.
            UserError: it has no tokens at all.
        """
        most = self._most_characters_per_token
        if most is not None and len(text) > most_tokens * most:
            raise too_long(f"more than {most_tokens}", most_tokens)
        # A batch, because only these let other threads run meanwhile.
        (encoded,) = self._fast.encode_batch_fast([text], add_special_tokens=not is_chat)
        return self.check(encoded.ids, most_tokens)

    def check(self, ids: Sequence[int], most_tokens: int) -> tuple[int, ...]:
        """Return token ids that a client may use as a prompt.

        Raises:
            TooLong: there are more than ``most_tokens``.
            UserError: there are none, or the vocabulary does not have one of them.
        """
        if len(ids) > most_tokens:
            raise too_long(str(len(ids)), most_tokens)
        if not ids:
            raise UserError("the prompt has no tokens", mend="send some text")
        largest = max(ids)
        if largest >= self.vocab_size:
            raise UserError(
                f"the prompt has token id {largest}; the model's vocabulary ends at {self.vocab_size - 1}",
                mend="send text, or ids of this model's own tokenizer",
            )
        return tuple(ids)

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Return a conversation as the model wants it written, up to where its answer begins.

        Raises:
            UserError: the tokenizer has no chat template, or its template refuses these messages.
        """
        if self._tokenizer.chat_template is None:
            raise UserError(
                "this model's tokenizer has no chat template",
                mend="use /v1/completions, or put a chat_template.jinja into the model's folder and deploy it again",
                details={"param": "messages", "code": NO_CHAT_TEMPLATE},
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as failure:  # the template is a program of whoever made the model
            raise UserError(
                f"the model's chat template refuses these messages: {failure}",
                mend="most templates want user and assistant in turn, with system at most once, first",
            ) from failure
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens; what is no valid UTF-8 becomes U+FFFD."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=True)
        return text

    def is_special(self, id_: int) -> bool:
        """Return whether a token is no text."""
        return id_ in self._special

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token that is written like this, if there is one: no text ever shows it."""
        id_: int | None = self._fast.token_to_id(text)
        return id_ if id_ in self._special else None

    def token_bytes(self, id_: int) -> bytes:
        """Return the bytes that a token stands for; of the tokens of a text they make up its UTF-8."""
        added = self._added.get(id_)
        if added is not None:
            return added.encode()
        token: str | None = self._fast.id_to_token(id_)
        if token is None:  # a model's vocabulary may be padded
            return b""
        if self._bytes is not None:
            return bytes(self._bytes[letter] for letter in token if letter in self._bytes)
        one = _ONE_BYTE.match(token)
        if one is not None:
            return bytes([int(one[1], 16)])
        return (token.replace(_SPACE, " ") if self._writes_spaces else token).encode()


def too_long(found: str, most_tokens: int) -> TooLong:
    """Return the error of a prompt of ``found`` tokens."""
    return TooLong(
        f"the prompt has {found} tokens, the model's window is {most_tokens}",
        mend="shorten it",
        details={"window_tokens": most_tokens},
    )


def _load(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        return load_tokenizer(folder)
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging as transformers_logging

    # It warns that the folder names another class; all of them read the same file.
    noisy = transformers_logging.get_logger("transformers.tokenization_utils_base")
    noisy.setLevel(logging.ERROR)
    try:
        return PreTrainedTokenizerFast.from_pretrained(os.fspath(folder), local_files_only=True)
    except Exception as failure:  # the library raises bare Exception for every file that it cannot read
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded: {failure}",
            mend="save it again with save_pretrained",
        ) from failure


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _longest(vocabulary: Iterable[str]) -> int:
    return max(map(len, vocabulary), default=1)


def _keeps_all(tokenizer: Any) -> bool:
    """Whether no text is lost on the way into tokens: a word that is unknown would be one token, however long."""
    model = tokenizer.model
    return type(model).__name__ == "BPE" and (model.unk_token is None or model.byte_fallback)


def _end_ids(folder: Path, own: int | None) -> tuple[int, ...]:
    """Return the tokens that end a text, by the tokenizer and the model's configuration."""
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # without one of these files the model just has fewer ends
        ends = config.get("eos_token_id") if isinstance(config, dict) else None
        found += [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
        if found and ends is not None:
            break
    return tuple(dict.fromkeys(found))
