"""Encoders: models with bidirectional attention that turn texts into vectors by pooling hidden states.

In transformers, encoders declare no pipeline plan. So this module lists the supported architectures and their parts.

A folder in the format of sentence-transformers lists the steps from a text to its vector in ``modules.json``. The
folder of the pooling step names the mode of pooling.

This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from share_compute.errors import UserError
from share_compute.files.json_files import read_json_file
from share_compute.files.strict import StrictModel

_WINDOW_KEY = "max_position_embeddings"
_DEFAULT_PADDING_ID = 1
"""Padding id of architectures with `counts_from_padding`, if the configuration has none."""
_NAMES = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len", "weightedmean")
_MODES = frozenset((*_NAMES, *(f"{name}_tokens" for name in _NAMES), "cls_token"))
"""Modes of sentence-transformers, as the value of ``pooling_mode`` or at the end of the name of a switch."""
_MOST_STEPS = 16
_MOST_SHOWN = 60
"""Maximum number of characters of a model's files that an error shows."""


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """Paths of an architecture's parts inside its base model."""

    layers: str = "encoder.layer"
    """Path of the list of layers."""
    closing: tuple[str, ...] = ()
    """Paths of the modules after the last layer."""
    counts_from_padding: bool = False
    """Whether position ids start after the id of the padding token, which leaves fewer positions for tokens."""


ENCODERS: Mapping[str, EncoderParts] = {
    "bert": EncoderParts(),
    "camembert": EncoderParts(counts_from_padding=True),
    "distilbert": EncoderParts("transformer.layer"),
    "modernbert": EncoderParts("layers", ("final_norm",)),
    "mpnet": EncoderParts(counts_from_padding=True),
    "roberta": EncoderParts(counts_from_padding=True),
    "xlm-roberta": EncoderParts(counts_from_padding=True),
}
"""Encoders that can be served, by ``model_type``. Each embeds tokens in a module ``embeddings``."""


class Pooling(StrictModel):
    """Rule that turns the hidden states of a text's tokens into one vector."""

    mode: Literal["mean", "cls", "last"] = "mean"
    """mean: average of all tokens; cls: the first token alone; last: the last token alone, only of decoders."""
    is_normalized: bool = False
    """Whether vectors are scaled to length 1."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration describes an encoder that can be served."""
    return config.get("model_type") in ENCODERS and not config.get("is_decoder")


def encoder_window(config: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens in a text for an encoder; None if the configuration has no limit."""
    window = config.get(_WINDOW_KEY)
    if not isinstance(window, int):
        return None
    if not ENCODERS[config["model_type"]].counts_from_padding:
        return window
    padding = config.get("pad_token_id")
    return window - 1 - (padding if isinstance(padding, int) else _DEFAULT_PADDING_ID)


def pooling_of(folder: Path, config: Mapping[str, Any]) -> Pooling | None:
    """Return the pooling of a folder's model; None if the model is not an encoder. The default is the mean.

    Args:
        folder: folder of the model.
        config: content of its config.json.

    Raises:
        UserError: ``modules.json`` lists steps, but the model is not a supported encoder; a step or option of the
            encoder is not supported; or a JSON file cannot be read.
    """
    steps = _steps(folder)
    if not is_encoder(config):
        if steps:
            given = _shown(str(config.get("model_type")))
            raise _cannot(f"{given!r} is none of the encoders that can be served: {', '.join(ENCODERS)}")
        return None
    pooling = Pooling()
    for kind, place in steps:
        if kind == "Pooling":
            pooling = Pooling(mode=_mode(folder, place), is_normalized=pooling.is_normalized)
        elif kind == "Normalize":
            pooling = pooling.model_copy(update={"is_normalized": True})
        elif kind != "Transformer":
            raise _cannot(f"modules.json asks for a {kind}")
    if _read(folder, "sentence_bert_config.json").get("do_lower_case"):
        raise _cannot("sentence_bert_config.json wants texts in lower case")
    return pooling


def trained_pooling(folder: Path | None, config: Mapping[str, Any]) -> Pooling:
    """Return the pooling of a model that is trained to embed texts.

    The model's folder may define it. The default is the mean for encoders. For decoders it is the last token, since
    only this token attends to the whole text.

    Args:
        folder: folder of the model; None for random weights.
        config: configuration of the model.

    Raises:
        UserError: the folder describes another pooling, a step that cannot be trained, or a JSON file cannot be read.
    """
    if is_encoder(config):
        return (None if folder is None else pooling_of(folder, config)) or Pooling()
    pooling = Pooling(mode="last")
    if folder is None:
        return pooling
    for kind, place in _steps(folder):
        if kind == "Pooling":
            if (modes := _modes(folder, place)) != {"lasttoken"}:
                raise _cannot(
                    f"its vectors are made by {_named(modes)}, those of a decoder by its last token"
                )
        elif kind == "Normalize":
            pooling = Pooling(mode="last", is_normalized=True)
        elif kind != "Transformer":
            raise _cannot(f"modules.json asks for a {kind}")
    return pooling


def described_pooling(pooling: Pooling, size: int, length: int) -> dict[str, Any]:
    """Return the files in the format of sentence-transformers that describe a pooling: the content by name.

    Args:
        pooling: the pooling.
        size: number of values of a vector.
        length: number of tokens to which texts are truncated.
    """
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling.is_normalized else [])]
    steps = [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{kind}" if place else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for place, kind in enumerate(kinds)
    ]
    switches = {
        f"pooling_mode_{name}": mode == pooling.mode
        for name, mode in (("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last"))
    }
    return {
        "modules.json": steps,
        "1_Pooling/config.json": {"word_embedding_dimension": size, **switches},
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
    }


def trained_window(folder: Path) -> int | None:
    """Return the number of tokens to which sentence-transformers truncates texts; None if the folder sets no limit.

    Args:
        folder: folder of the model.

    Raises:
        UserError: ``sentence_bert_config.json`` cannot be read.
    """
    found = _read(folder, "sentence_bert_config.json").get("max_seq_length")
    return found if isinstance(found, int) and found > 0 else None


def _steps(folder: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each step in modules.json; [] if there is no such file.

    The folder is relative to the model's folder. Raise UserError if it is outside.
    """
    listed = _read(folder, "modules.json", list)
    if len(listed) > _MOST_STEPS:
        raise _cannot(f"modules.json lists {len(listed)} steps; at most {_MOST_STEPS} are read")
    steps: list[tuple[str, str]] = []
    for step in listed:
        kind = step.get("type") if isinstance(step, dict) else None
        place = step.get("path", "") if isinstance(step, dict) else None
        if not isinstance(kind, str) or not isinstance(place, str):
            raise _cannot("modules.json lists no steps with their types")
        if not _is_inside(folder, place):
            raise _cannot(f"the folder of step {len(steps)} in modules.json is outside the model's folder")
        steps.append((_shown(kind.rpartition(".")[2]), place))
    return steps


def _is_inside(folder: Path, place: str) -> bool:
    """Return whether a relative path stays in a folder, after its links are resolved."""
    relative = Path(place)
    if relative.is_absolute() or ".." in relative.parts or not place.isprintable():
        return False
    return Path(os.path.realpath(folder / relative)).is_relative_to(os.path.realpath(folder))


def _mode(folder: Path, place: str) -> Literal["mean", "cls"]:
    """Return the mode of a pooling step, from ``pooling_mode`` or from switches ``pooling_mode_*``."""
    modes = _modes(folder, place)
    if modes <= {"mean_tokens", "mean"}:
        return "mean"
    if modes in ({"cls_token"}, {"cls"}):
        return "cls"
    raise _cannot(f"its vectors are made by {_named(modes)}")


def _modes(folder: Path, place: str) -> set[str]:
    """Return the modes that the pooling step in the folder ``place`` defines."""
    config = _read(folder, str(Path(place, "config.json")))
    named = config.get("pooling_mode")
    if named is not None:
        return {str(named)}
    return {name.removeprefix("pooling_mode_") for name, on in config.items() if on is True} - {
        "include_prompt"
    }


def _named(modes: set[str]) -> str:
    """Return the modes of a pooling step as text for an error; other content of the file is not shown."""
    known = sorted(modes & _MODES) + ["an unknown mode"] * (not modes <= _MODES)
    return " and ".join(known)


def _read(folder: Path, name: str, kind: type = dict) -> Any:
    """Read a JSON file of a folder, whose content must be of type ``kind``; return ``kind()`` if there is no file."""
    try:
        if not (folder / name).is_file():
            return kind()
    except OSError as failure:
        raise UserError(
            f"{_shown(name)} cannot be read: {failure.strerror}", hint="fix or replace the file"
        ) from failure
    return read_json_file(folder / name, kind, shown=_shown(name))


def _shown(text: str) -> str:
    """Return the printable characters at the start of a text from a model's files, for an error."""
    return "".join(character for character in text[:_MOST_SHOWN] if character.isprintable())


def _cannot(reason: str) -> UserError:
    return UserError(
        f"this embedder cannot be used: {reason}",
        hint="choose an encoder whose vectors are the mean of its tokens or its first token",
    )
