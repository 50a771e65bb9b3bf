"""Export of a checkpoint as a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from share_compute.errors import NotFound, UserError
from share_compute.models.adapter_names import is_adapter
from share_compute.models.objective import objective_of
from share_compute.models.storage.checksums import CHECKSUMS, damage
from share_compute.models.storage.weights import FolderWriter, WeightFolder, stream_file
from share_compute.specification import LoraSpec, TrainJob

_CONFIG = "config.json"
_OF_A_WHOLE_MODEL = (
    _CONFIG,
    "generation_config.json",
    "modules.json",
    "1_Pooling",
    "sentence_bert_config.json",
)


def export_checkpoint(checkpoint: Path, spec: TrainJob, target: Path) -> int:
    """Write a checkpoint as a folder without the optimizer's state; return the folder's size in bytes.

    Adapters are written alone, or merged into the weights if the job sets ``training.lora.merge``. Unchanged files are
    hard links where the file system supports them.

    Args:
        checkpoint: finished folder of the checkpoint.
        spec: specification of the job.
        target: folder to write; replaced if it exists.

    Raises:
        NotFound: the checkpoint no longer exists.
        UserError: the checkpoint is damaged.
        Unavailable: the disk is full or cannot be written.
    """
    if not checkpoint.is_dir():
        raise NotFound(
            f"there is no checkpoint {checkpoint}", hint="list the job's checkpoints, and choose another"
        )
    wrong = damage(checkpoint, _is_for_others)
    if wrong is not None:
        raise UserError(wrong, hint="choose another checkpoint of the job, or put a whole copy back")
    lora = spec.training.lora
    writer = FolderWriter(target)
    others = [file for file in sorted(checkpoint.iterdir()) if _is_for_others(file.name)]
    if lora is None:
        writer.link(others)
        return writer.finish()
    without = ("model", *(() if lora.merge else _OF_A_WHOLE_MODEL))
    writer.link(file for file in others if not file.name.startswith(without))
    folder = WeightFolder(checkpoint)
    if lora.merge:
        for number, group in enumerate(_merged(folder, lora)):
            _write(writer, f"model-0000-{number:04}.part", group)
    else:
        config = json.loads((checkpoint / _CONFIG).read_text())
        description = adapter_description(config, spec)
        writer.write_json("adapter_config.json", description)
        _write(
            writer, "adapter_model-0000-0000.part", _adapters(folder, description["modules_to_save"] or ())
        )
    return writer.finish()


def adapter_description(config: Mapping[str, Any], spec: TrainJob) -> dict[str, Any]:
    """Return the content of ``adapter_config.json`` for the adapters that a job trains.

    Args:
        config: configuration of the model that is adapted.
        spec: specification of the job.

    Raises:
        UserError: the configuration describes no model for the task that can be cut, or a name in
            ``training.lora.targets`` matches no matrix in its layers.
    """
    from share_compute.models.adapters import adapter_config  # noqa: PLC0415 - slow to import
    from share_compute.models.huggingface.decoder import task_sketch  # noqa: PLC0415
    from share_compute.models.huggingface.parts import part_names, whole_parts  # noqa: PLC0415

    assert spec.training.lora is not None
    objective = objective_of(spec)
    plain = task_sketch(config, objective)
    outline = part_names(plain, objective)
    return adapter_config(
        spec.training.lora,
        plain,
        outline.places,
        spec.model.hub or str(spec.model.path),
        task=objective.task,
        whole=whole_parts(plain, outline, objective),
    )


def _is_for_others(name: str) -> bool:
    return name != CHECKSUMS and not name.startswith("optimizer")


def _adapters(folder: WeightFolder, whole: Iterable[str]) -> dict[str, Tensor]:
    from share_compute.models.adapters import saved_name  # noqa: PLC0415 - slow to import

    beginnings = tuple(f"{name}." for name in whole)
    return {
        saved_name(name): folder.read(name)
        for name in folder.names()
        if is_adapter(name) or name.startswith(beginnings)
    }


def _merged(folder: WeightFolder, lora: LoraSpec) -> Iterator[dict[str, Tensor]]:
    """Yield the model's weights with adapters merged into them, grouped by file of the checkpoint."""
    for names in folder.groups():
        own = [name for name in names if not is_adapter(name)]
        if own:
            yield {name: _with_adapter(folder, name, lora) for name in own}


def _with_adapter(folder: WeightFolder, name: str, lora: LoraSpec) -> Tensor:
    weight = folder.read(name)
    matrix = name.removesuffix(".weight")
    a, b = (f"{matrix}.lora_{part}.weight" for part in "AB")
    if a not in folder:
        return weight
    # The operations are in the same order as in peft, so that the bits are the same as in the job's result.
    return weight + folder.read(b) @ folder.read(a) * (lora.alpha / lora.rank)


def _write(writer: FolderWriter, name: str, tensors: Mapping[str, Tensor]) -> None:
    for piece in stream_file(tensors):
        writer.write(name, piece)
