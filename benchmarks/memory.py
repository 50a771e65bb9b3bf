"""Compare the memory of the members of a stage with the formula of plans, with and without shares of AdamW's state.

1, 2 and 4 members of one stage train a Llama of 26 M parameters, then one of 55 M. The memory of a member is the
resident memory of its process after some steps, less that of a member that trains a tiny model with the same code. The
peer is the memory that the plan predicts. A line for each number of members also compares both ways to keep the state.

Before that, sequences of 1,024 to 16,384 tokens are computed by 1, 2 and 4 members with ``parallelism.sequence``. The
figure is what autograd keeps of the largest slice for the backward pass, without parameters; the peer is the formula.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _harness import Ours, arguments, cluster, corpus, print_figure
from torch import Tensor

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage, dissect
from share_compute.models.huggingface.slices import LocalRing
from share_compute.models.losses import loss_sum
from share_compute.models.stage import Stage
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job

MEMBERS = (1, 2, 4)
VOCABULARY = 2048
LARGE = {
    26: {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4},
    55: {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 6},
}
"""Shapes of the models by their parameters in millions."""
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
GOAL = 0.1
"""Allowed difference from the formula, as a fraction."""
MIB = 2**20


SLICES = (1, 2, 4)
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SLICED = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 176,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": LENGTHS[-1],
}  # fmt: skip


class Need(NamedTuple):
    """Memory of the largest member of a stage, in bytes."""

    measured: float
    predicted: float


def job(folder: Path, shape: dict[str, int], members: int, optimizer: str) -> TrainJob:
    """Return a job of one stage, in which weights, gradients and the optimizer's state take most of the memory."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **shape,
    }
    document: dict[str, Any] = {
        "model": {"config": config},
        "data": {"files": [str(corpus(folder, 500_000))], "validation_fraction": 0, "test_fraction": 0},
        "tokenizer": {"vocab_size": VOCABULARY},
        "training": {"steps": 1000, "batch_size": 4, "microbatches": 4, "sequence_length": 32},
        "parallelism": {
            "stages": 1,
            "members_per_stage": members,
            "threads": 1,
            "backups": False,
            "optimizer": optimizer,
        },
    }
    return parse_job(document)


def measured(spec: TrainJob, folder: Path, nodes: list[str], steps: int) -> Need:
    """Train some steps; return the resident memory and the predicted memory of the largest member."""
    ours = Ours(spec, folder, nodes, [1e10] * len(nodes))
    try:
        ours.block(1, steps)
        statuses = ours.led.group.ask_statuses().values()
        planned = max(member.memory_bytes for member in ours.plan.stages[0].members)
        return Need(max(status.resident_bytes for status in statuses), planned)
    finally:
        ours.close()


def kept_bytes(stage: Stage, ids: Tensor, targets: Tensor) -> int:
    """Return what autograd keeps of a slice for its backward pass, in bytes, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in stage.module.parameters()}
    kept: dict[int, int] = {}
    tensors: list[Tensor] = []  # memory that is released could be counted again under the same address

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_sum(stage.forward(ids), targets)
    return sum(kept.values())


def slices() -> None:
    """Print the activations of a member for sequences that several members compute."""
    blueprint = Blueprint(config=SLICED)
    layers = SLICED["num_hidden_layers"]
    assert isinstance(layers, int)
    stage = build_stage(blueprint, Shard("m", 0, layers, layers), torch.device("cpu"))
    stage.initialize(0)
    stage.cut_sequences()
    profile = dissect(blueprint)
    parts = (profile.embedding, *profile.layers, profile.head)
    for length in LENGTHS:
        whole = 0
        predicted = sum(part.activation_bytes.at(length) for part in parts)
        ids, targets = torch.randint(0, 256, (2, 1, length))
        for count in SLICES:
            pairs = zip(ids.chunk(count, 1), targets.chunk(count, 1), strict=True)
            if count == 1:
                need = whole = kept_bytes(stage, ids, targets)
            else:
                tasks = {place: partial(kept_bytes, stage, *pair) for place, pair in enumerate(pairs)}
                need = max(LocalRing(range(count)).run(count, tasks).values())
            print_figure(
                f"activations_{length}_tokens_{count}_members",
                ours=need / MIB,
                peer=predicted / count / MIB,
                peer_name="the formula of the plan",
                ratio=(1 + GOAL) * predicted / count / need,
                unit="MiB",
                of_whole=round(need / whole, 3),
            )


def main() -> None:
    """Print the figures."""
    options = arguments(__doc__ or "")
    steps = max(3, options.steps)
    slices()
    with tempfile.TemporaryDirectory() as folder, cluster(max(MEMBERS)) as nodes:
        for members, (size, shape) in product(MEMBERS, LARGE.items()):
            needs = {}
            for optimizer in ("replicated", "sharded"):
                large, tiny = (
                    measured(
                        job(Path(folder), each, members, optimizer),
                        Path(tempfile.mkdtemp(dir=folder)),
                        nodes[:members],
                        steps,
                    )
                    for each in (shape, TINY)
                )
                need = Need(large.measured - tiny.measured, large.predicted - tiny.predicted)
                needs[optimizer] = need.measured
                print_figure(
                    f"memory_{optimizer}_{members}",
                    ours=need.measured / MIB,
                    peer=need.predicted / MIB,
                    peer_name="the formula of the plan",
                    ratio=(1 + GOAL) * need.predicted / need.measured,
                    unit="MiB",
                    difference=round(need.measured / need.predicted - 1, 3),
                    million_parameters=size,
                )
            print_figure(
                f"memory_sharded_vs_replicated_{members}",
                ours=needs["sharded"] / MIB,
                peer=needs["replicated"] / MIB,
                peer_name="replicated",
                ratio=needs["replicated"] / needs["sharded"],
                unit="MiB",
                million_parameters=size,
            )


if __name__ == "__main__":
    main()
