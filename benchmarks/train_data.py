"""Compare tokens/s of one stage of two members (one thread each) with DistributedDataParallel on gloo."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _harness import LAYERS, Ours, Rival, arguments, cluster, compare, job, reported_blocks, rows
from torch.nn.parallel import DistributedDataParallel
from train_pipeline import _Module

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.losses import loss_sum
from share_compute.protocol.schedule import blocks, even_shares
from share_compute.shards import Shard
from share_compute.specification import TrainJob
from share_compute.training.optimizers import build_optimizer


def worker(
    rank: int, world: int, store: str, end: Connection, folder: str, text: str, config: dict[str, Any]
) -> None:
    """Run one process of the rival."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    spec = TrainJob.model_validate_json(text)
    stage = build_stage(Blueprint(config=config), Shard("m", 0, LAYERS, LAYERS), torch.device("cpu"))
    stage.initialize(spec.training.seed)
    module = DistributedDataParallel(_Module(stage).train(), gradient_as_bucket_view=True)
    optimizer = build_optimizer(spec.training.optimizer, module.parameters())
    take = rows(folder, text)
    size = spec.training.microbatch_size
    own = blocks(even_shares(spec.training.batch_size // size, world))[rank]
    for block in reported_blocks(end, take):
        losses: list[float] = []
        for inputs, targets in block:
            optimizer.zero_grad()
            total = torch.zeros(1)
            for microbatch in own:
                piece = slice(microbatch * size, (microbatch + 1) * size)
                # Gradients are reduced once, with the last microbatch, as DDP's guide to accumulation recommends.
                with nullcontext() if microbatch == own[-1] else module.no_sync():
                    loss = loss_sum(module(inputs[piece]), targets[piece]) / targets[piece].numel() / len(own)
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            losses.append(float(total))
        end.send(_mean_over(losses))
    dist.destroy_process_group()


def _mean_over(losses: list[float]) -> list[float]:
    tensor = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(tensor)
    return [float(value) for value in tensor / dist.get_world_size()]


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as name, cluster(2) as nodes:
        folder = Path(name)
        spec = job(folder, steps=10_000, stages=1, members_per_stage=2)
        ours = Ours(spec, folder, nodes, [1.0, 1.0])
        rival = Rival(worker, 2, str(folder), spec.model_dump_json(), ours.config)
        try:
            compare("train_data", "torch DistributedDataParallel, gloo", ours, rival, spec, options)
        finally:
            rival.close()
            ours.close()


if __name__ == "__main__":
    main()
