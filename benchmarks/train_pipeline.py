"""Compare tokens/s of two one-thread stages with torch.distributed.pipelining's Schedule1F1B on gloo.

Each stage has one member. Backups are off, since the rival has none either; `overhead.py` measures their cost.
"""

from __future__ import annotations

import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import LAYERS, Ours, Rival, arguments, cluster, compare, job, reported_blocks, rows
from torch import Tensor, nn

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.losses import loss_sum
from share_compute.shards import Shard
from share_compute.specification import TrainJob
from share_compute.training.optimizers import build_optimizer

CUT = 5
"""Number of layers of the first stage; the second has the head."""


class _Module(nn.Module):
    """The stage code of share-compute as a plain module, as torch's pipelining expects it."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.module = stage.module
        self._stage = stage

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._stage.forward(inputs)
        return outputs


def worker(
    rank: int, world: int, store: str, end: Connection, folder: str, text: str, config: dict[str, Any]
) -> None:
    """Run one process of the rival."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    spec = TrainJob.model_validate_json(text)
    edges = (0, CUT, LAYERS)
    stage = build_stage(
        Blueprint(config=config), Shard("m", edges[rank], edges[rank + 1], LAYERS), torch.device("cpu")
    )
    stage.initialize(spec.training.seed)
    module = _Module(stage).train()
    optimizer = build_optimizer(spec.training.optimizer, module.parameters())

    def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_sum(logits, targets) / targets.numel()

    schedule = Schedule1F1B(
        PipelineStage(module, rank, world, torch.device("cpu")),
        spec.training.batch_size // spec.training.microbatch_size,
        loss_fn=mean_loss,
    )
    take = rows(folder, text)
    for block in reported_blocks(end, take):
        losses: list[float] = []
        for inputs, targets in block:
            optimizer.zero_grad()
            parts: list[Tensor] = []
            if rank == 0:
                schedule.step(inputs, return_outputs=False)
            else:
                schedule.step(target=targets, losses=parts, return_outputs=False)
                losses.append(float(torch.stack(parts).mean().detach()))
            optimizer.step()
        end.send(losses)
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as name, cluster(2) as nodes:
        folder = Path(name)
        spec = job(folder, steps=10_000, strategy="compute_weighted", stages=2, backups=False)
        ours = Ours(spec, folder, nodes, [float(CUT), float(LAYERS - CUT)])
        assert [stage.stop for stage in ours.plan.stages] == [CUT, LAYERS]
        rival = Rival(worker, 2, str(folder), spec.model_dump_json(), ours.config)
        try:
            compare(
                "train_pipeline",
                "torch.distributed.pipelining Schedule1F1B, gloo",
                ours,
                rival,
                spec,
                options,
            )
        finally:
            rival.close()
            ours.close()


if __name__ == "__main__":
    main()
