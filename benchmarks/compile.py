"""Compare passes of training and decoded tokens of serving with ``compile: auto`` and eager ones.

Each start is a process of its own. The first compiles the layers, and the second finds the first one's artifacts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _harness import arguments, print_figure, print_speeds
from torch import Tensor

from share_compute.inference.runtime.stage import ServingStage
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute_actors.compiled.artifacts import Artifacts
from share_compute_actors.compiled.choice import LEAST_GAIN, gain_of
from share_compute_actors.inference.compiled_stage import CompiledStage
from share_compute_actors.training.compiled_layers import CompiledLayers, TrainingCase

LAYERS, VOCABULARY = 4, 1024
BATCH, LENGTH = 4, 128
"""Samples of a microbatch, and their tokens."""
KEY = (0, 1, 0)
PAST = 128
"""Earlier tokens of each sequence that is decoded."""
BATCHES = (1, 16)
"""Sequences that are decoded together."""


def start(hidden: int, folder: str, blocks: int, passes: int) -> None:
    """Compile a stage as a member does, and print the times of blocks of passes as JSON.

    Args:
        hidden: hidden size of the Llama layers.
        folder: folder of the artifacts.
        blocks: number of blocks of each side, which take turns.
        passes: number of microbatches forward and backward in a block.
    """
    blueprint = Blueprint(config=_config(hidden))
    stage = build_stage(blueprint, Shard("m", 0, LAYERS, LAYERS), torch.device("cpu"))
    stage.initialize(0)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    layers = CompiledLayers(stage, "this machine", Artifacts(Path(folder)))
    times = layers.compare([TrainingCase(KEY, ids)])
    gain = gain_of([times])
    found: dict[str, Any] = {"warm_up_s": times.warm_up_s, "gain": gain, "auto": [], "eager": []}
    stage.module.train()
    for _ in range(blocks):
        for side, is_on in (("auto", gain >= LEAST_GAIN), ("eager", False)):
            layers.is_on = is_on
            found[side].append(_seconds(stage, ids, passes))
    print(json.dumps(found))


def decode(hidden: int, folder: str, blocks: int, passes: int, sequences: int) -> None:
    """Compile a serving stage as a member does, and print the times of blocks of engine steps as JSON.

    Args:
        hidden: as in `start`.
        folder: as in `start`.
        blocks: as in `start`.
        passes: number of engine steps in a block.
        sequences: number of sequences that are decoded together.
    """
    stage = ServingStage(_config(hidden), Shard("m", 0, LAYERS, LAYERS), torch.device("cpu"))
    source = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for tensor in stage.tensors().values():
            tensor.normal_(0, 0.02, generator=source)
    stage.seal()
    layers = CompiledStage(stage, "this machine", Artifacts(Path(folder)))
    step = stage.dry_run(sequences, PAST)
    with torch.inference_mode():
        times = layers.compare([step, *(stage.dry_run(count, 1) for count in (1, 2, 3))])
    gain = gain_of([times])
    found: dict[str, Any] = {"warm_up_s": times.warm_up_s, "gain": gain, "auto": [], "eager": []}
    for _ in range(blocks):
        for side, is_on in (("auto", gain >= LEAST_GAIN), ("eager", False)):
            layers.is_on = is_on
            began_s = time.perf_counter()
            for _ in range(passes):
                step()
            found[side].append(time.perf_counter() - began_s)
    print(json.dumps(found))


def _config(hidden: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "vocab_size": VOCABULARY,
    }


def _seconds(stage: Any, ids: Tensor, passes: int) -> float:
    began_s = time.perf_counter()
    for _ in range(passes):
        stage.prepare_cell(*KEY)
        stage.forward(ids).mean().backward()
    return time.perf_counter() - began_s


def main() -> None:
    """Run both starts for each hidden size, and print the figures."""
    options = arguments(__doc__ or "")
    for hidden in (128,) if options.quick else (256, 1024):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (
                _started("--start", hidden, folder, options.blocks, options.steps) for _ in range(2)
            )
        numbers = BATCH * LENGTH * options.steps
        own, other = ([numbers / seconds for seconds in second[side]] for side in ("auto", "eager"))
        print_speeds(
            "compile_vs_eager",
            own,
            other,
            peer_name="eager",
            hidden_size=hidden,
            is_compiled=second["gain"] >= LEAST_GAIN,
            measured_gain=round(second["gain"], 3),
        )
        print_figure(
            "compile_second_start",
            ours=second["warm_up_s"],
            peer=first["warm_up_s"],
            peer_name="first start",
            ratio=first["warm_up_s"] / second["warm_up_s"],
            unit="s",
            hidden_size=hidden,
        )
        for sequences in BATCHES[: 1 if options.quick else None]:
            with tempfile.TemporaryDirectory() as folder:
                steps = 4 * options.steps
                found = _started("--decode", hidden, folder, options.blocks, steps, sequences)
            own, other = (
                [sequences * steps / seconds for seconds in found[side]] for side in ("auto", "eager")
            )
            print_speeds(
                "compile_serving_vs_eager",
                own,
                other,
                peer_name="eager",
                hidden_size=hidden,
                sequences=sequences,
                is_compiled=found["gain"] >= LEAST_GAIN,
                measured_gain=round(found["gain"], 3),
            )


def _started(flag: str, *arguments: int | str) -> dict[str, Any]:
    command = [sys.executable, __file__, flag, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        start(int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
    elif sys.argv[1:2] == ["--decode"]:
        decode(int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
    else:
        main()
