"""Decoding with two ranks of one thread each: ours, tensor parallelism of transformers, and one process.

All sides generate greedily from the same prompt, one sequence, with the same model in float32: a Llama, and then a
mixture of experts.
"""

from __future__ import annotations

import json
import os
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _harness import Rival, print_turns, reported_blocks, take_turns
from torch import Tensor, distributed

from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.scheduler.engine_steps import Chunk, EngineStep, Opening
from share_compute.inference.scheduler.options import SamplingOptions
from share_compute.shards import Shard
from share_compute_actors.inference.ranks import DividedShard, ServingRanks

LAYERS, PROMPT_TOKENS, TOKENS_PER_STEP = 4, 8, 16
CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": ("tensor_decode", CONFIG),
    "mixtral": (
        "tensor_mixture_decode",
        {**CONFIG, "intermediate_size": 896, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}
"""The beginning of the names of a model's figures, and its configuration."""
SIDES = {"ours": 1, "transformers": 2, "one rank": 1}
"""Number of processes that the benchmark starts for each side."""
Generate = Callable[[list[int], int], list[int]]
"""Returns the tokens after a prompt, as many as the second argument says."""


@contextmanager
def model_folder(model_type: str, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder with a model of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with TemporaryDirectory(prefix="sc-tensor-") as folder:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **config, initializer_range=0.05), dtype=torch.float32
        )
        model.save_pretrained(folder)
        yield Path(folder)


def take(step: int) -> tuple[Tensor, Tensor]:
    """Return the prompt of a step, twice."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 8192, (PROMPT_TOKENS,), generator=draw)
    return ids, ids


def worker(rank: int, world: int, store: str, end: Connection, side: str, folder: str, port: int) -> None:
    """Run one process of a side."""
    torch.set_num_threads(1)
    with ExitStack() as closing:
        if side == "transformers":
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
            closing.callback(distributed.destroy_process_group)
            generate = _transformers(folder)
        else:
            generate = _ours(folder, closing, ranks=2 if side == "ours" else 1)
        for block in reported_blocks(end, take):
            prompts = [prompt.tolist() for prompt, _ in block]
            end.send([token for prompt in prompts for token in generate(prompt, TOKENS_PER_STEP)])


def _transformers(folder: str) -> Generate:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto", tp_size=2)
    ).eval()

    @torch.inference_mode()
    def generate(prompt: list[int], count: int) -> list[int]:
        ids, cache, tokens = torch.tensor([prompt]), None, []
        for _ in range(count):
            outputs: Any = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids, cache = outputs.logits[:, -1].argmax(-1, keepdim=True), outputs.past_key_values
            tokens.append(int(ids))
        return tokens

    return generate


def _ours(folder: str, closing: ExitStack, ranks: int) -> Generate:
    config = json.loads((Path(folder) / "config.json").read_text())
    shard = Shard("m", 0, LAYERS, LAYERS)
    if ranks > 1:
        processes = ServingRanks(ranks, ranks, 300)
        closing.callback(processes.close)
        stage: ServingStage = processes.divide(
            DividedShard(config=config, shard=shard, dtype="float32", quantizes=False, window_tokens=2048)
        )
    else:
        stage = ServingStage(config, shard, torch.device("cpu"))
    stage.load(Path(folder))

    def generate(prompt: list[int], count: int) -> list[int]:
        options = SamplingOptions(temperature=0, seed=0, max_tokens=count)
        opening = Opening(0, len(prompt) + count, options, tuple(prompt), len(prompt))
        ids, start, tokens = tuple(prompt), 0, []
        for index in range(count):
            step = EngineStep(
                index, 1, 0, () if index else (opening,), (), (Chunk(0, start, len(ids), ids, samples=True),)
            )
            (sampled,) = stage.compute(step, torch.tensor(ids))
            start, ids = start + len(ids), (sampled.token,)
            tokens.append(sampled.token)
        stage.close(0)
        stage.clear()
        return tokens

    return generate


def measure(options: Namespace) -> None:
    """Measure and print the figures of decoding."""
    for model_type, (figures, config) in MODELS.items():
        with model_folder(model_type, config) as folder, socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            server.close()
            sides = {side: Rival(worker, world, side, str(folder), port) for side, world in SIDES.items()}
            turns = take_turns(sides, TOKENS_PER_STEP, options)
        for figure, peer in ((f"{figures}_vs_torch", "transformers"), (f"{figures}_vs_one_rank", "one rank")):
            print_turns(
                figure,
                turns,
                peer,
                options,
                tokens_per_block=TOKENS_PER_STEP * options.steps,
                tokens_that_differ=sum(one != other for one, other in turns.pairs),
            )
