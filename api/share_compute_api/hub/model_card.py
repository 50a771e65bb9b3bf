"""Writes the model card (README.md) of a training job's result.

The format is that of the Hugging Face Hub: https://huggingface.co/docs/hub/model-cards. A card has no paths of the
server, no names of machines and no keys.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from share_compute.files.plain_yaml import write_yaml
from share_compute.models.huggingface.licence import licence_in
from share_compute.quantities import bytes_text, seconds_text
from share_compute.specification import Task, TrainJob
from share_compute.specification.layers import expanded
from share_compute.specification.paths import with_file_names
from share_compute.specification.task import METRICS_BESIDE_LOSS
from share_compute.store import ArtifactRecord, JobRecord, MetricRecord, Store

_STEP = re.compile(r"^step-(\d{8})$")
"""Name of an exported checkpoint; the number is its step."""
_MOST_ROWS = 20
_MOST_METRICS = 400
"""Approximate maximum number of steps of each split that are read for the curve."""
_FENCE = "~~~~"
_PIPELINES: dict[Task, str] = {
    "language_model": "text-generation",
    "text_classification": "text-classification",
    "image_classification": "image-classification",
    "tabular_classification": "tabular-classification",
    "tabular_regression": "tabular-regression",
    "embedding": "sentence-similarity",
}
"""Task -> its ``pipeline_tag`` on the Hub."""
_TORCH = {
    "dropout": "Dropout",
    "gelu": "GELU",
    "layer_norm": "LayerNorm",
    "linear": "Linear",
    "relu": "ReLU",
    "sigmoid": "Sigmoid",
    "silu": "SiLU",
    "tanh": "Tanh",
}
"""Type of a layer for rows of tables -> its class in torch.nn."""
_TABLE_CODE = """\
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

folder = Path("FOLDER")
data = json.loads((folder / "data.json").read_text())
model = nn.Sequential(
{layers}
)
weights = {{}}
for file in folder.glob("model*.safetensors"):
    weights |= {{name.removeprefix("layers."): weight for name, weight in load_file(file).items()}}
model.load_state_dict(weights)
model.eval()


def encoded(row):
    inputs = []
    for column in data["columns"]:
        value = row.get(column["name"])
        if column["categories"] is None:
            inputs.append(((column["fill"] if value is None else value) - column["mean"]) / column["scale"])
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            inputs += [float(text == one) for one in column["categories"]]
    return torch.tensor([inputs])


row = {{one["name"]: (one["categories"] or [one["fill"]])[0] for one in data["columns"]}}  # put your values here
target = data["target"]
with torch.no_grad():
    output = model(encoded(row))[0]
print({answer})
"""


def has_card(artifact: ArtifactRecord, job: JobRecord) -> bool:
    """Return whether an artifact gets a model card: only a folder with a model of a training job does."""
    is_model = isinstance(job.spec, TrainJob) and artifact.name not in job.spec.report
    return is_model and artifact.path.is_dir()


def model_card(store: Store, job: JobRecord, artifact: ArtifactRecord) -> str:
    """Return the model card of a training job's artifact, as Markdown with YAML front matter.

    Args:
        store: the store of the job's metrics and machines.
        job: the training job.
        artifact: the result, or an exported checkpoint. The card of a checkpoint covers the steps up to the checkpoint.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    spec = job.training
    exported = _STEP.match(artifact.name)
    until = None if exported is None else int(exported[1])
    metrics = store.progress.metrics(job.id, until_step=until, most=_MOST_METRICS)
    split, last = _last_evaluation(metrics)
    library = _library(spec)
    data = ModelCardData(
        base_model=_base_model(spec),
        library_name=library,
        license=None if spec.model.path is None else licence_in(spec.model.path),
        pipeline_tag=_PIPELINES[spec.model_task],
        tags=["share-compute"],
        model_name=job.name,
        eval_results=[
            EvalResult(
                task_type=_PIPELINES[spec.model_task],
                dataset_type="custom",
                dataset_name=f"{split} samples",
                metric_type=name,
                metric_value=value,
            )
            for name, value in last.items()
        ]
        or None,
    )
    sections = (
        f"# {job.name}",
        _introduction(job, until),
        "## Data",
        _data(spec),
        "## Results",
        _table(("metric", f"value on {split} samples"), [(name, _number(last[name])) for name in last])
        or "The model was not evaluated.",
        _curve(metrics),
        "## Training",
        _facts(job, until),
        "The job file, without its paths:",
        f"{_FENCE}yaml\n{_job_file(spec)}{_FENCE}",
        "## Machines",
        _machines(store, job),
        "## Use",
        _use(job, artifact, library),
    )
    body = "\n\n".join(section for section in sections if section)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n"))


def _introduction(job: JobRecord, until: int | None) -> str:
    spec = job.training
    source = _base_model(spec) or ("a pretrained model" if spec.model.path is not None else None)
    begun = "random weights" if source is None else source
    step = "" if until is None else f" This is the checkpoint of step {until}."
    task = spec.resolved_task.replace("_", " ")
    return f"A model for the task {task}, trained with share-compute from {begun}.{step}"


def _base_model(spec: TrainJob) -> str | None:
    """Return the name of the base model on the Hub; None if it is not known."""
    return spec.model.hub


def _library(spec: TrainJob) -> str | None:
    """Return the library that loads the result; None for declared layers."""
    if spec.model.layers is not None:
        return None
    lora = spec.training.lora
    if lora is not None and not lora.merge:
        return "peft"
    return "sentence-transformers" if spec.data.pairs is not None else "transformers"


def _data(spec: TrainJob) -> str:
    data = spec.data
    if data.dataset is not None:
        return f"The data set `{data.dataset}` of scikit-learn."
    names = [_code(file.name) for file in data.all_files]
    shown = ", ".join(names[:_MOST_ROWS]) + (
        f" and {len(names) - _MOST_ROWS} more" if len(names) > _MOST_ROWS else ""
    )
    text = f"Files of the submitter: {shown}."
    if data.validation_files or data.test_files:
        return text
    kept = f"{data.validation_fraction:.1%} of the samples were kept for validation, {data.test_fraction:.1%}"
    return f"{text} {kept} for the test."


def _code(text: str) -> str:
    return "`" + re.sub(r"[`|\x00-\x1f\x7f]", "_", text) + "`"


def _last_evaluation(metrics: Sequence[MetricRecord]) -> tuple[str, dict[str, float]]:
    """Return the split with the most reliable evaluation, and its last metrics; an empty dict if there is none."""
    for split in ("test", "validation", "train"):
        found = [metric.data for metric in metrics if metric.split == split]
        if found:
            names = ("loss", *METRICS_BESIDE_LOSS)
            last = found[-1]
            own = {name: last[name] for name in names if last.get(name) is not None}
            return split, {**own, **(last.get("tasks") or {})}
    return "train", {}


def _curve(metrics: Sequence[MetricRecord]) -> str:
    """Return a table of the training loss and the validation's metrics, of at most 2 x `_MOST_ROWS` steps."""
    train = {metric.step: metric.data for metric in metrics if metric.split == "train"}
    validation = {metric.step: metric.data for metric in metrics if metric.split == "validation"}
    steps = sorted({*_spread(sorted(train)), *_spread(sorted(validation))})
    others = [name for name in METRICS_BESIDE_LOSS if any(name in data for data in validation.values())]
    columns = [
        "step",
        "loss",
        *(["validation loss"] if validation else []),
        *(f"validation {name}" for name in others),
    ]
    rows = []
    for step in steps:
        row = [str(step), _number(train.get(step, {}).get("loss"))]
        names = ["loss", *others] if validation else []
        rows.append([*row, *(_number(validation.get(step, {}).get(name)) for name in names)])
    return _table(columns, rows)


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `_MOST_ROWS` of the steps, evenly spaced, including the first and the last."""
    if len(steps) <= _MOST_ROWS:
        return list(steps)
    return [steps[place * (len(steps) - 1) // (_MOST_ROWS - 1)] for place in range(_MOST_ROWS)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; an empty string if there are no rows."""
    if not rows:
        return ""
    lines = chain([columns, ["---"] * len(columns)], rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def _facts(job: JobRecord, until: int | None) -> str:
    spec, plan = job.training, job.plan
    rows = [("steps", f"{job.step if until is None else until} of {job.total_steps}")]
    rows += [("batch size", str(spec.training.batch_size)), ("loss", spec.resolved_loss)]
    if plan is not None:
        rows += [("parameters", f"{plan.parameters:,}"), ("layers", str(plan.num_layers))]
    if until is None and job.started_at is not None and job.finished_at is not None:
        rows.append(("time", seconds_text((job.finished_at - job.started_at).total_seconds())))
    return _table(("setting", "value"), rows)


def _job_file(spec: TrainJob) -> str:
    """Return the fields of the job that differ from their defaults, as YAML; the names of files replace their paths."""
    plain = with_file_names(spec.without_links())
    if spec.model.hub is not None:
        plain = plain.model_copy(update={"model": plain.model.model_copy(update={"path": None})})
    return write_yaml(
        plain.model_dump(mode="json", exclude_defaults=True, exclude={"tags", "group", "then", "report"})
    )


def _machines(store: Store, job: JobRecord) -> str:
    """Return a table of the devices of the job's last plan, without the names of the machines."""
    if job.plan is None or not job.plan.machines:
        return "The machines were not recorded."
    counts = Counter(_devices(store, job.plan.machines))
    rows = [(str(count), *device) for device, count in sorted(counts.items())]
    stages = f"{len(job.plan.stages)} pipeline stages, " if len(job.plan.stages) > 1 else ""
    machines = "machine" if len(job.plan.machines) == 1 else "machines"
    return f"Last plan: {stages}{len(job.plan.machines)} lent {machines}.\n\n" + _table(
        ("devices", "kind", "name", "memory lent"), rows
    )


def _devices(store: Store, machines: frozenset[str]) -> Iterator[tuple[str, str, str]]:
    for machine in store.contributors.list(ids=machines):
        for device in machine.capacity or ():
            yield device.kind, _code(device.name), bytes_text(device.memory_bytes)


def _shared_heads(spec: TrainJob) -> list[str]:
    """Return the names of the classification heads of a language model that several tasks share."""
    if len(spec.tasks) < 2:
        return []
    return [
        f"`head_{task.name}.weight`"
        for task, single in zip(spec.tasks, spec.single_tasks, strict=True)
        if single.resolved_task != "language_model"
    ]


def _use(job: JobRecord, artifact: ArtifactRecord, library: str | None) -> str:
    spec = job.training
    if library is None:
        return _table_use(spec) or (
            "`model.safetensors` has the weights, and `layers.json` the declared layers, which are torch modules "
            "of the same names." + (" `tasks.json` has the head of each task." if spec.tasks else "")
        )
    served = {
        "language_model": "AutoModelForCausalLM",
        "image_classification": "AutoModelForImageClassification",
        "embedding": "AutoModel",
    }.get(spec.model_task, "AutoModelForSequenceClassification")
    if library == "peft":
        has_classes = spec.resolved_task in ("text_classification", "image_classification")
        classes = ", num_labels=NUMBER_OF_CLASSES" if has_classes else ""
        base = _base_model(spec) or "FOLDER_OF_THE_BASE_MODEL"
        return (
            f"{_FENCE}python\nfrom peft import PeftModel\nfrom transformers import {served}\n\n"
            f'base = {served}.from_pretrained("{base}"{classes})\n'
            f'model = PeftModel.from_pretrained(base, "FOLDER_OR_REPOSITORY")\n{_FENCE}'
            + ("\n\n`data.json` has the classes, in their order." if classes else "")
        )
    if library == "sentence-transformers":
        return (
            f"{_FENCE}python\nfrom sentence_transformers import SentenceTransformer\n\n"
            f'vectors = SentenceTransformer("FOLDER_OR_REPOSITORY").encode(["a text", "another one"])\n{_FENCE}'
        )
    code = (
        f"{_FENCE}python\nfrom transformers import {served}\n\n"
        f'model = {served}.from_pretrained("FOLDER_OR_REPOSITORY")\n{_FENCE}'
    )
    if spec.model_task != "language_model":
        return code
    if heads := _shared_heads(spec):
        return (
            f"{code}\n\nThe weights also have {', '.join(heads)}: linear layers that classify the hidden state "
            "of the last token. `tasks.json` has their classes, in their order."
        )
    command = f"share-compute serve {job.id}/{artifact.name}"
    serving = (
        f"Serve it to OpenAI clients, on the cluster that trained it:\n\n{_FENCE}sh\n{command}\n{_FENCE}"
    )
    return f"{serving}\n\nOr load it:\n\n{code}"


def _table_use(spec: TrainJob) -> str | None:
    """Return code that predicts a row of a table; None for other data and for layers that need more code."""
    layers = expanded(spec.model.layers or ())
    if spec.tasks or spec.data.table is None or any(placed.spec.type not in _TORCH for placed in layers):
        return None
    lines = []
    for placed in layers:
        options = ", ".join(f"{name}={value!r}" for name, value in placed.spec.options.items())
        lines.append(f"    nn.{_TORCH[placed.spec.type]}({options}),")
    if spec.resolved_task == "tabular_regression":
        answer = 'output.item() * target["scale"] + target["mean"]'
    else:
        answer = 'target["categories"][int(output.argmax() if len(output) > 1 else output > 0)]'
    return f"{_FENCE}python\n{_TABLE_CODE.format(layers=chr(10).join(lines), answer=answer)}{_FENCE}"
