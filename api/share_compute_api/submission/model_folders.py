"""Checks a model's folder without loading the model. Each error names the field of the job or upload."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from share_compute.errors import UserError
from share_compute.files.field_errors import refused
from share_compute.files.json_files import MOST_JSON_BYTES, read_json_file
from share_compute.models.huggingface.encoder_types import encoder_window, is_encoder, trained_window
from share_compute.models.huggingface.sizes import KV_HEAD_KEYS, WINDOW_KEYS, whole_number
from share_compute_api.workers.isolated.messages import FindLargestId
from share_compute_api.workers.isolated.remembered import Asks

_INDEX = "model.safetensors.index.json"
_MOST_INDEX_BYTES = 16 << 20
_NUMBERED = re.compile(r"^model-\d{5}-of-(\d{5})\.safetensors$")
_MOST_NAMED = 5


@contextmanager
def checking(field: str) -> Iterator[None]:
    """Convert an OSError or ValueError from the block to a UserError about ``field``."""
    try:
        yield
    except (OSError, ValueError) as failure:
        raise refused(field, f"it cannot be checked: {failure}", "fix its rights, or the path") from failure


@contextmanager
def below(prefix: str) -> Iterator[None]:
    """Convert a `UserError` from the block, so that the fields that it names are below ``prefix``."""
    try:
        yield
    except UserError as failure:
        named = failure.details.get("fields") or [{"field": "", "problem": failure.message}]
        fields = [{**one, "field": f"{prefix}.{one['field']}".rstrip(".")} for one in named]
        raise UserError(
            "; ".join(f"{one['field']}: {one['problem']}" for one in fields),
            hint=failure.hint or "fix these fields of the job",
            details={"fields": fields},
        ) from failure


def require_path(path: Path, field: str) -> None:
    """Raise UserError unless a path is absolute and exists."""
    if not path.is_absolute():
        raise refused(field, f"{path} is a relative path", "write paths on the server in full")
    if not path.exists():
        fix = "copy it to the server, or fix the path"
        if "*" in path.name:
            fix = "write the name of each file: patterns with * are not read"
        raise refused(field, f"{path} does not exist on the server", fix)


def check_model_folder(folder: Path, field: str) -> None:
    """Raise UserError unless a folder has a config.json, and weights in safetensors format."""
    require_path(folder, field)
    suffixes = {file.suffix for file in folder.iterdir()}
    if not (folder / "config.json").is_file():
        raise refused(field, f"{folder} has no config.json", "name the folder of a Hugging Face model")
    if ".safetensors" in suffixes:
        return
    if ".bin" in suffixes:
        raise refused(
            field,
            f"{folder} has .bin weights only, which could run code when they are read",
            "convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)",
        )
    raise refused(field, f"{folder} has no *.safetensors", "copy the weights into the folder")


def check_weights(folder: Path, field: str) -> None:
    """Raise UserError if a file of a model's weights is missing, or its length does not match its header."""
    from safetensors import SafetensorError, safe_open

    for name in _weight_files(folder, field):
        file = folder / name
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as failure:
            raise refused(field, f"{file} is damaged: {failure}", "copy or download it again") from failure


def _weight_files(folder: Path, field: str) -> list[str]:
    """Return the names of the files that contain the weights; raise UserError if one is missing."""
    there = sorted(file.name for file in folder.glob("model*.safetensors"))
    wanted = set(there)
    if (folder / _INDEX).is_file():
        places = read_json(folder / _INDEX, field, _MOST_INDEX_BYTES).get("weight_map")
        wanted = {str(name) for name in places.values()} if isinstance(places, dict) else set()
        if not wanted or any(Path(name).name != name for name in wanted):
            raise refused(field, f"{folder / _INDEX} does not list the weights", "save the model again")
    counts = {int(found[1]) for name in there if (found := _NUMBERED.match(name))}
    if counts:
        last = max(counts)
        wanted |= {f"model-{number:05}-of-{last:05}.safetensors" for number in range(1, last + 1)}
    missing = sorted(wanted.difference(there))
    if missing or not wanted:
        named = ", ".join(missing[:_MOST_NAMED]) or "model.safetensors"
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise refused(field, f"{folder} lacks {named}{more}", "copy all files of the model into the folder")
    return sorted(wanted)


def model_window(folder: Path, config: Mapping[str, Any], *, is_stretched: bool = False) -> int | None:
    """Return a model's longest sequence, in tokens; None if the folder does not specify the length.

    Args:
        folder: folder of the model.
        config: contents of its config.json.
        is_stretched: whether to ignore the length at which sentence-transformers truncates texts for an encoder.
    """
    if not is_encoder(config):
        return whole_number(config, *WINDOW_KEYS)
    known = [encoder_window(config), None if is_stretched else trained_window(folder)]
    return min((window for window in known if window is not None), default=None)


def largest_token_id(folder: Path, field: str, processes: Asks) -> int | None:
    """Return the largest token id of a folder's tokenizer; None if tokenizer.json is missing or has no tokens.

    Args:
        folder: folder of the tokenizer.
        field: field of the job, for errors.
        processes: isolated processes, which read the file.
    """
    with checking(field):
        if not (folder / "tokenizer.json").is_file():
            return None
    try:
        return processes.ask(FindLargestId(file=folder / "tokenizer.json")).largest
    except UserError as failure:
        raise refused(field, failure.message, failure.hint or "save the tokenizer again") from failure


def check_token_ids(largest: int | None, vocab_size: int | None, field: str) -> None:
    """Raise UserError if the largest token id is outside the model's vocabulary; skip the check if either is None."""
    if largest is not None and vocab_size is not None and largest >= vocab_size:
        raise refused(
            field,
            f"the tokenizer has {largest + 1} ids, the model only {vocab_size}",
            "use the tokenizer that belongs to the model",
        )


def check_stages(stages: int | None, layers: int | None) -> None:
    """Raise UserError if there are more stages than layers; skip the check if either number is None."""
    if stages is not None and layers is not None and stages > layers:
        raise refused(
            "parallelism.stages",
            f"{stages} stages cannot share {layers} layers: each needs at least one",
            f"ask for at most {layers} stages",
        )


def check_ranks(ranks: int, config: Mapping[str, Any]) -> None:
    """Raise UserError if ranks cannot share a model's KV heads or its MLP evenly; skip the sizes that are unknown."""
    heads = whole_number(config, *KV_HEAD_KEYS)
    if heads is not None and heads > 0 and heads % ranks:
        fitting = [str(count) for count in range(1, min(heads, 64) + 1) if heads % count == 0]
        raise refused(
            "parallelism.tensor",
            f"{ranks} ranks cannot share {heads} KV heads evenly: each rank has the cache of its own heads",
            f"set it to one of {', '.join(fitting)}",
        )
    size = whole_number(config, "intermediate_size")
    if size is not None and size % ranks:
        raise refused(
            "parallelism.tensor",
            f"{ranks} ranks cannot share the {size} outputs of mlp evenly",
            "set parallelism.tensor to a number that divides the sizes of the model",
        )


def read_json(path: Path, field: str, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file of a model.

    Raises:
        UserError: the file cannot be read, is too large, or is not a JSON object; the error names the field.
    """
    try:
        return read_json_file(path, dict, most_bytes=most_bytes)
    except UserError as failure:
        raise refused(field, failure.message, failure.hint or "fix or replace the file") from failure
