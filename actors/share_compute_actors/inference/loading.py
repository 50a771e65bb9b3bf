"""Builds a member's serving shard and loads its weights; tensors that the member already has are reused."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import ray
import torch
import xxhash
from platformdirs import user_cache_path
from torch import Tensor

from share_compute.inference.runtime.engine_stage import EngineStage
from share_compute.inference.runtime.quantization import SCALE, is_quantized
from share_compute.shard import Shard
from share_compute_actors.group.allocator import passing_through
from share_compute_actors.group.fetching import SourceClient, fill, fits
from share_compute_actors.inference.messages import ServingSetup
from share_compute_actors.machine.device import measured_device
from share_compute_actors.messages import Sources, server_source


def build_shard(
    setup: ServingSetup, weights: Any, shard: Shard, before: EngineStage | None
) -> tuple[EngineStage, dict[str, Tensor]]:
    """Build a shard's module, and return it with the tensors that must still be loaded, by stored name.

    Args:
        setup: parameters of the member.
        weights: the `ServedWeights` actor.
        shard: layers of the model.
        before: the member's current module, whose tensors are reused and which is unusable afterwards; None if there
            is none.

    Raises:
        ContributorLost: this process does not see the GPU that was measured.
        PlanInfeasible: the shard does not fit into this machine's memory.
        UserError: the model cannot be served.
    """
    torch.set_num_threads(setup.threads)
    with fits(shard, setup.name):
        stage = _stage(setup, weights, shard)
        return stage, stage.tensors() if before is None else stage.take_over(before)


def _stage(setup: ServingSetup, weights: Any, shard: Shard) -> EngineStage:
    config, device = setup.blueprint.config or {}, measured_device(setup.device, setup.gpu)
    quantizes = setup.dtype == "int8"
    dtype: torch.dtype = torch.float32 if quantizes else getattr(torch, setup.dtype)
    if setup.pooling is not None:
        from share_compute.inference.runtime.encoder_stage import EncoderStage  # noqa: PLC0415 - slow to import

        return EncoderStage(
            config, shard, device, dtype, window_tokens=setup.window_tokens, pooling=setup.pooling
        )
    from share_compute.inference.runtime.stage import ServingStage  # noqa: PLC0415 - transformers is slow to import

    tokenizer = _tokenizer(weights) if shard.is_last else None
    return ServingStage(
        config,
        shard,
        device,
        dtype,
        quantizes=quantizes,
        window_tokens=setup.window_tokens,
        tokenizer=tokenizer,
    )


def fill_shard(setup: ServingSetup, weights: Any, stage: EngineStage, missing: dict[str, Tensor]) -> None:
    """Load a shard's missing tensors.

    Args:
        setup: parameters of the member.
        weights: the `ServedWeights` actor.
        stage: newly built module.
        missing: tensors to fill, by stored name. The dict is emptied, so that it keeps no tensor in memory.

    Raises:
        ContributorLost: weights arrived damaged in every attempt.
        ShardStoreLost: the `ServedWeights` actor died.
        PlanInfeasible: the shard does not fit into this machine's memory.
        UserError: the weights do not belong to the configuration.
    """
    client = SourceClient(Sources((server_source(weights),)))
    groups: dict[tuple[str, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in missing.items():
        groups.setdefault(_served_as(name, tensor, stage.dtype), {})[name] = tensor
    missing.clear()
    with fits(stage.shard, setup.name), torch.inference_mode(), passing_through():
        for (method, dtype), tensors in groups.items():
            fill(tensors, client, method, dtype)


def _served_as(name: str, tensor: Tensor, dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """Return the name of the `ServedWeights` method that returns a tensor's rows, and the dtype of these rows."""
    if is_quantized(name):
        return "int8_weights", torch.int8
    if name.endswith(SCALE):
        return "scales", torch.float32
    return ("weights", dtype) if tensor.dtype == dtype else ("exact_weights", torch.float32)


def _tokenizer(weights: Any) -> Path | None:
    """Copy the tokenizer's files to a folder on this machine, and return the folder; None if the model has none.

    The folder is named by a digest of its contents, so that members on this machine with the same tokenizer share it.
    """
    files: dict[str, bytes] = ray.get(weights.tokenizer_files.remote())
    if not files:
        return None
    digest = xxhash.xxh3_128()
    for name, content in sorted(files.items()):
        digest.update(f"{name}/{len(content)}/".encode())
        digest.update(content)
    folder = user_cache_path("share-compute") / "tokenizers" / digest.hexdigest()
    for name, content in files.items():
        place = folder / name
        if not place.exists() or place.stat().st_size != len(content):
            folder.mkdir(parents=True, exist_ok=True)
            # Other members may write the same file at the same time.
            partial = folder / f".{name}.{secrets.token_hex(8)}.partial"
            partial.write_bytes(content)
            partial.replace(place)
    return folder
