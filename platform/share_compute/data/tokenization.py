"""Loads a tokenizer from a folder, or trains one on a job's text."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from share_compute.data.tokens import writing
from share_compute.errors import UserError
from share_compute.models.configuration import model_vocab_size
from share_compute.specification import TrainJob

DEFAULT_VOCAB_SIZE = 4096
MIN_VOCAB_SIZE = 257
"""Minimum vocabulary size of a trained tokenizer: a token for each byte, and one for the end of a document."""
END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"
MASK = "<|mask|>"
LEARN_CHARACTERS = 1 << 28
"""Maximum number of characters that a tokenizer is trained on, rounded up to whole pieces of text."""
_MOST_SETTINGS_BYTES = 4 << 20
_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
"""Names of files; a folder with a tokenizer has at least one of them."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Source of a job's tokenizer: an existing folder, or training on the job's text."""

    kind: Literal["folder", "trained"]
    path: Path | None
    vocab_size: int | None
    """Requested vocabulary size of a tokenizer that is trained; None for a folder."""

    def digest(self) -> str:
        """Return a hexadecimal SHA-256 digest of this source.

        For a folder, the digest covers its files with the suffixes .json, .txt, .model and .jinja.
        """
        digest = hashlib.sha256(f"{self.kind} {self.vocab_size}".encode())
        for file in sorted(self.path.iterdir()) if self.path else ():
            if file.is_file() and file.suffix in {".json", ".txt", ".model", ".jinja"}:
                with file.open("rb") as opened:
                    content = hashlib.file_digest(opened, "sha256").digest()
                digest.update(file.name.encode() + b"\0" + content)
        return digest.hexdigest()


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def has_chat_template(folder: Path) -> bool:
    """Return whether a folder has a chat template, in chat_template.jinja or in a readable tokenizer_config.json."""
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    try:
        if file.stat().st_size > _MOST_SETTINGS_BYTES:
            return False
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and settings.get("chat_template") is not None


def find_source(spec: TrainJob) -> TokenizerSource:
    """Return the source of a job's tokenizer.

    The first of these that applies is returned:

    - the folder that the job names;
    - a tokenizer trained to the size that the job names;
    - the model's own tokenizer;
    - a tokenizer trained to the size of the model's vocabulary, or to `DEFAULT_VOCAB_SIZE`.

    For declared layers, the vocabulary is that of the first embedding.

    Raises:
        UserError: the named folder has no tokenizer, the model's configuration cannot be used, or the size is
            less than `MIN_VOCAB_SIZE` or more than the model's vocabulary size.
    """
    limit = model_vocab_size(spec.model)
    if spec.tokenizer.path is not None:
        if not has_tokenizer(spec.tokenizer.path):
            raise UserError(
                f"{spec.tokenizer.path} holds no tokenizer (none of {', '.join(_FILES)})",
                hint="give a folder that save_pretrained wrote, or leave tokenizer.path out to train one",
            )
        return TokenizerSource("folder", spec.tokenizer.path, None)
    if spec.tokenizer.vocab_size is None and spec.model.path is not None and has_tokenizer(spec.model.path):
        return TokenizerSource("folder", spec.model.path, None)
    size = spec.tokenizer.vocab_size or limit or DEFAULT_VOCAB_SIZE
    if size < MIN_VOCAB_SIZE:
        raise UserError(
            f"a tokenizer of {size} tokens cannot be trained: bytes alone need {MIN_VOCAB_SIZE}",
            hint=f"set vocab_size to at least {MIN_VOCAB_SIZE}, or name a tokenizer in tokenizer.path",
        )
    check_fits(size, limit)
    return TokenizerSource("trained", None, size)


def expected_vocab_size(spec: TrainJob) -> int | None:
    """Return the expected vocabulary size of a job; None if its model reads no tokens, or its layers are declared.

    The job's data is not read. A tokenizer that is trained on little text may have fewer tokens.

    Raises:
        UserError: the model's configuration or the tokenizer cannot be used.
    """
    if not spec.reads_tokens:
        return None
    declared = model_vocab_size(spec.model)
    if declared is not None:
        return declared
    source = find_source(spec)
    return source.vocab_size if source.path is None else vocabulary_size(load_tokenizer(source.path))


def check_fits(vocab_size: int, limit: int | None) -> None:
    """Raise UserError if a tokenizer has more than ``limit`` tokens, the model's vocabulary size; None: no limit."""
    if limit is not None and vocab_size > limit:
        raise UserError(
            f"the tokenizer has {vocab_size} tokens, but the model's vocab_size is {limit}",
            hint=f"make the model's vocab_size at least {vocab_size}, or the tokenizer's at most {limit}",
            details={"tokenizer_vocab_size": vocab_size, "model_vocab_size": limit},
        )


def load_tokenizer(folder: Path) -> Any:
    """Load a Hugging Face tokenizer from a folder, without network access and without code from the folder.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - heavy

    try:
        return AutoTokenizer.from_pretrained(
            os.fspath(folder), trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as failure:
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded: {reason}",
            hint="check that AutoTokenizer.from_pretrained loads it without trust_remote_code",
        ) from failure


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, pads: bool = False) -> Any:
    """Train a byte-level BPE tokenizer, which can encode any text.

    A small corpus may give fewer tokens than ``vocab_size``.

    Args:
        texts: texts to learn from.
        vocab_size: wanted number of tokens.
        pads: whether to add tokens for padding and masking, and to separate pairs of texts by the end-of-text token.
    """
    from tokenizers import (  # noqa: PLC0415 - heavy
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - heavy

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_OF_DOCUMENT, *((PADDING, MASK) if pads else ())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_first(texts, LEARN_CHARACTERS), trainer=trainer)
    special = {"eos_token": END_OF_DOCUMENT}
    if pads:
        special |= {"pad_token": PADDING, "mask_token": MASK}
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A",
            pair=f"$A {END_OF_DOCUMENT} $B:1",
            special_tokens=[(END_OF_DOCUMENT, tokenizer.token_to_id(END_OF_DOCUMENT))],
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, clean_up_tokenization_spaces=False)


def _first(texts: Iterable[str], characters: int) -> Iterable[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer into ``folder / "tokenizer"``.

    Raises:
        Unavailable: the folder cannot be written.
    """
    with writing(folder):
        part, final = folder / "tokenizer.part", folder / "tokenizer"
        for stale in (part, final):
            if stale.exists():
                shutil.rmtree(stale)
        try:
            tokenizer.save_pretrained(part)
        except Exception as failure:
            # `tokenizers` raises a bare Exception if a write to disk fails.
            if type(failure) is Exception:
                raise OSError(str(failure)) from failure
            raise
        part.rename(final)


def vocabulary_size(tokenizer: Any) -> int:
    """Return one more than the largest token id."""
    return int(max(tokenizer.get_vocab().values())) + 1
