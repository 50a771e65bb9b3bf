"""Compare training and serving on one NVIDIA GPU with plain torch and with `generate` of transformers, on the same GPU.

Both sides are resident and take turns. With two stages, two members share the GPU, so that only the cost of the
boundary is measured. Training computes in bfloat16 by autocast. The rival is a loop of plain torch over the same
microbatches, with a fused AdamW; unlike a member of share-compute, it may use kernels that are not deterministic.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _attempts import Machines
from _harness import Ours, cluster, compare, job, print_figure, rows, start_cluster
from _serving import Served, make_model
from inference import Work
from pydantic import TypeAdapter
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.program import command_of
from share_compute.shards import Shard
from share_compute.specification import TrainJob, parse_job
from share_compute.topology import Device, Topology

GPU = torch.device("cuda")
TRAINED = {
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
}
"""Changes to the model of the other training benchmarks: 156 M parameters."""
SERVED = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
"""The model that is served in bfloat16: 350 M parameters."""
WORKS = (
    Work("prefill_512", 1, 512, 1),
    Work("decode_1", 1, 64, 128),
    Work("streams_8", 8, 64, 64),
    Work("streams_32", 32, 64, 64),
)
MEMORY_BYTES = 12 * 2**30
"""Memory that each machine reports; all of them are on one GPU."""


def probed() -> Device:
    """Return the GPU as a contributor would measure it, with less memory."""
    command = command_of("share_compute_actors.machine.probe", "--json", "--device", "cuda")
    probe = subprocess.run(command, check=True, capture_output=True)
    (device,) = TypeAdapter(tuple[Device, ...]).validate_json(probe.stdout)
    return replace(device, memory_bytes=MEMORY_BYTES)


# -- training --------------------------------------------------------------------------------------------------------


def training_job(folder: Path, **parallelism: Any) -> TrainJob:
    """Return the job that both sides train."""
    document = job(folder, 10_000, backups=False, **parallelism).model_dump(mode="json", exclude_none=True)
    document["model"]["config"].update(TRAINED)
    document["training"].update(sequence_length=512, precision="bfloat16", max_gradient_norm=None)
    return parse_job(document)


class Loop:
    """Training in this process, with nothing but torch and transformers.

    Args:
        spec: the job.
        config: configuration of the model.
        take: returns the samples of a step.
    """

    def __init__(self, spec: TrainJob, config: dict[str, Any], take: Callable[[int], Any]) -> None:
        options = spec.training.optimizer
        count = int(config["num_hidden_layers"])
        stage = build_stage(Blueprint(config=config), Shard("m", 0, count, count), GPU)
        stage.initialize(spec.training.seed)  # both sides begin with the same weights
        self._microbatches = spec.training.microbatches or 1
        self._take = take
        self._model: Any = stage.module.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            options.learning_rate,
            options.betas,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def block(self, first: int, count: int) -> tuple[float, list[float]]:
        """Train ``count`` steps; return the seconds and the losses."""
        samples = [self._take(step) for step in range(first, first + count)]
        torch.cuda.synchronize()
        start_s, losses = time.perf_counter(), []
        for inputs, targets in samples:
            losses.append(self._step(inputs, targets))
        return time.perf_counter() - start_s, losses

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        self._optimizer.zero_grad()
        parts = []
        pairs = zip(inputs.chunk(self._microbatches), targets.chunk(self._microbatches), strict=True)
        for ids, wanted in pairs:
            with torch.autocast("cuda", torch.bfloat16):
                logits = self._model(input_ids=ids.to(GPU), use_cache=False).logits
            loss = cross_entropy(logits.float().flatten(0, 1), wanted.to(GPU).flatten())
            (loss / self._microbatches).backward()
            parts.append(loss.detach())
        self._optimizer.step()
        return float(torch.stack(parts).mean())


def measure_training(device: Device, stages: int, blocks: int, steps: int) -> None:
    """Measure a job of ``stages`` stages, each with one member."""
    with tempfile.TemporaryDirectory() as name, cluster(stages) as nodes:
        folder = Path(name)
        spec = training_job(folder, strategy="uniform", stages=stages)
        ours = Ours(spec, folder, nodes, [1e13] * stages, device)
        try:
            config = dict(ours.config or {})
            loop = Loop(spec, config, rows(str(folder), spec.model_dump_json()))
            options = argparse.Namespace(blocks=blocks, steps=steps)
            figure = "gpu_train_solo" if stages == 1 else f"gpu_train_{stages}_stages"
            compare(figure, f"plain torch on the same {device.name}", ours, loop, spec, options)
        finally:
            ours.close()


# -- serving ---------------------------------------------------------------------------------------------------------


def measure_serving(device: Device, works: Sequence[Work], rounds: int) -> None:
    """Measure one stage, two stages, and transformers."""
    chance = random.Random(5)
    wanted = {
        "dtype": "bfloat16",
        "max_concurrent": max(work.streams for work in works),
        "prompt_tokens": max(work.prompt for work in works),
        "new_tokens": max(work.new for work in works),
    }
    with tempfile.TemporaryDirectory() as name, start_cluster() as local, ExitStack() as stack:
        folder = Path(name) / "model"
        parameters = make_model(folder, **SERVED)
        one, *pair = Machines(local, device).topology(3).contributors
        window = int(str(SERVED["max_position_embeddings"]))
        stages = {"objective": "throughput", "parallelism": {"stages": 2}}
        solo = stack.enter_context(closing(Served(folder, Topology((one,)), window, **wanted)))
        split = stack.enter_context(
            closing(Served(folder, Topology(tuple(pair)), window, **stages, **wanted))
        )
        solo.wait_for(1)
        split.wait_for(2)
        sides = {"solo": ours(solo), "two stages": ours(split), "transformers": theirs(folder)}
        for work in works:
            measure_work(work, sides, rounds, chance, gpu=device.name, parameters=parameters)


def measure_work(
    work: Work, sides: dict[str, Generate], rounds: int, chance: random.Random, **facts: Any
) -> None:
    """Let all sides do a work in turn, after a round of warm-up, and print the figures."""
    seconds: dict[str, list[float]] = {}
    texts: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        prompts = work.prompts(chance)
        for side in chance.sample(sorted(sides), len(sides)):
            took_s, written = sides[side](prompts, work.new)
            if number:
                seconds.setdefault(side, []).append(took_s)
                texts.setdefault(side, []).extend(written)
    peers = seconds["transformers"]
    for side, figure in (("solo", "gpu_solo_vs_transformers"), ("two stages", "gpu_split_vs_transformers")):
        own = seconds[side]
        print_figure(
            figure,
            ours=work.tokens / statistics.median(own),
            peer=work.tokens / statistics.median(peers),
            peer_name="generate of transformers on the same GPU",
            ratio=statistics.median(b / a for a, b in zip(own, peers, strict=True)),
            unit="tokens/s",
            work=work.name,
            rounds=rounds,
            texts_that_differ=sum(a != b for a, b in zip(texts[side], texts["transformers"], strict=True)),
            **facts,
        )


Generate = Callable[[list[list[int]], int], tuple[float, list[list[int]]]]
"""Function from prompts and a number of new tokens to the seconds and the tokens."""


def ours(served: Served) -> Generate:
    """Return the side of share-compute."""

    def generate(prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        streams = served.follow(served.submit(prompts, new))
        return streams.seconds, streams.texts

    return generate


def theirs(folder: Path) -> Generate:
    """Return the side of transformers, which computes in this process."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(GPU).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        start_s = time.perf_counter()
        tokens = torch.tensor(prompts, device=GPU)
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        texts: list[list[int]] = written[:, tokens.shape[1] :].tolist()
        return time.perf_counter() - start_s, texts

    return generate


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: one round, two short blocks")
    parser.add_argument("--only", choices=("serving", "training"), help="leave out the other one")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of serving")
    parser.add_argument("--blocks", type=int, default=6, help="measured turns of training")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU, so nothing is measured", file=sys.stderr)
        return
    rounds, blocks, steps = (1, 2, 2) if options.quick else (options.rounds, options.blocks, 8)
    device = probed()
    if options.only != "training":
        measure_serving(device, WORKS, rounds)
    for stages in (1, 2) if options.only != "serving" else ():
        measure_training(device, stages, blocks, steps)


if __name__ == "__main__":
    main()
