"""Compare two ranks of one thread each with tensor parallelism of torch and of transformers, and with one process.

Training: all sides train the same Llama layers of hidden size 1024 with AdamW, and take turns. Decoding: see
`_tensor_decode`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import compress
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from _harness import Rival, arguments, print_turns, reported_blocks, take_turns
from _tensor_decode import measure as measure_decoding
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.models.losses import loss_sum
from share_compute.models.stage import Stage
from share_compute.sharding.outdated import Outdated
from share_compute.shards import Shard
from share_compute.specification.optimization import OptimizerSpec
from share_compute.training.optimizers import build_optimizer
from share_compute_actors.training.member.ranks import Ranks

LAYERS, VOCABULARY = 2, 1024
CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}
BATCH, LENGTH = 4, 256
"""Samples of a step, which is one microbatch, and their tokens."""
PLANS = {"ours": 1, "parallelize_module": 2, "one rank": 1}
"""Number of processes that the benchmark starts for each side."""


def take(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, ``[batch, seq]``."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def worker(rank: int, world: int, store: str, end: Connection, side: str) -> None:
    """Run one process of a side."""
    torch.set_num_threads(1)
    blueprint = Blueprint(config=CONFIG)
    stage = build_stage(blueprint, Shard("m", 0, LAYERS, LAYERS), torch.device("cpu"))
    with ExitStack() as closing:
        updated: Callable[[], None] = _nothing
        if side == "ours":
            ranks = Ranks(2, 2, 300)
            closing.callback(ranks.close)
            ranks.divide(stage, blueprint, BATCH, LENGTH)
            updated = partial(ranks.outdate, Outdated.trained)
        stage.initialize(0)
        if side == "parallelize_module":
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            closing.callback(dist.destroy_process_group)
            parallelized(stage, world)
        stage.module.train()
        _steps(end, stage, updated)


def _nothing() -> None:
    """Do nothing after an update, because the process has all parameters."""


def _steps(end: Connection, stage: Stage, updated: Callable[[], None]) -> None:
    parameters = list(stage.module.parameters())
    divided = [isinstance(parameter, DTensor) for parameter in parameters]
    optimizers = [  # a fused optimizer takes parameters of one kind
        build_optimizer(OptimizerSpec(), list(compress(parameters, kind)))
        for kind in (divided, [not one for one in divided])
        if any(kind)
    ]
    for block in reported_blocks(end, take):
        losses: list[float] = []
        for inputs, targets in block:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_sum(stage.forward(inputs), targets) / targets.numel()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            updated()
            losses.append(loss.item())
        end.send(losses)


def parallelized(stage: Stage, world: int) -> None:
    """Cut the layers as Megatron-LM does, with torch's own styles."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    styles |= {name: RowwiseParallel() for name in rows}
    for layer in stage.layers.values():
        assert isinstance(layer, nn.Module)
        parallelize_module(layer, mesh, styles)


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "")
    measure_decoding(options)
    sides = {side: Rival(worker, world, side) for side, world in PLANS.items()}
    turns = take_turns(sides, BATCH * LENGTH, options)
    for figure, peer in (
        ("tensor_training_vs_torch", "parallelize_module"),
        ("tensor_vs_one_rank", "one rank"),
    ):
        print_turns(
            figure,
            turns,
            peer,
            options,
            steps_per_block=options.steps,
            largest_loss_difference=max(abs(one - other) for one, other in turns.pairs),
        )


if __name__ == "__main__":
    main()
