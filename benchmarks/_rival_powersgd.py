"""One worker of DistributedDataParallel with the PowerSGD hook, for `slow_links.py`: prints its time in seconds.

Usage: ``python _rival_powersgd.py RANK WORLD ADDRESS PORT FIRST LAST FOLDER < job.json``. The worker runs on a host of
its own, and ``ADDRESS`` is that of rank 0. Steps after ``FIRST`` until ``LAST`` are measured. The first two steps of
PowerSGD are not compressed, so ``FIRST`` is at least 2.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from _harness import rows
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from train_pipeline import _Module

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.losses import loss_sum
from share_compute.shards import Shard
from share_compute.specification import parse_job
from share_compute.training.optimizers import build_optimizer


def main() -> None:
    """Train, and print the seconds of the measured steps."""
    rank, world, address, port, first, last, folder = sys.argv[1:]
    spec = parse_job(json.load(sys.stdin))
    assert spec.kind == "train"
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=int(rank), world_size=int(world)
    )
    config = spec.model.config
    assert config is not None
    layers = config["num_hidden_layers"]
    stage = build_stage(Blueprint(config=config), Shard("m", 0, layers, layers), torch.device("cpu"))
    stage.initialize(spec.training.seed)
    # All gradients are in one bucket. With several, workers may start the sums of two buckets in different orders,
    # and gloo then ends the process, because the sizes differ.
    module = DistributedDataParallel(_Module(stage).train(), bucket_cap_mb=1024, gradient_as_bucket_view=True)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=2
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = build_optimizer(spec.training.optimizer, module.parameters())
    take = rows(folder, spec.model_dump_json())
    size = spec.training.batch_size // int(world)
    own = slice(int(rank) * size, (int(rank) + 1) * size)
    begin = 0.0
    for step in range(1, int(last) + 1):
        inputs, targets = (each[own] for each in take(step))
        optimizer.zero_grad()
        (loss_sum(module(inputs), targets) / targets.numel()).backward()
        optimizer.step()
        if step == int(first):
            dist.barrier()
            begin = time.monotonic()
    dist.barrier()
    print(json.dumps({"seconds": time.monotonic() - begin}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
