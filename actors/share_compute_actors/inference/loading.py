"""Loads a member's serving shard: builds it and fetches its weights; tensors that the member already has are reused."""

from __future__ import annotations

import gc
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import ray
import torch
import xxhash
from platformdirs import user_cache_path
from torch import Tensor

from share_compute.inference.placement import Holding
from share_compute.inference.runtime.engine_stage import EngineStage
from share_compute.inference.runtime.quantization import SCALE, is_quantized
from share_compute.shards import Shard
from share_compute_actors.group.allocator import passing_through, trim
from share_compute_actors.group.fetching import SourceClient, fill, fits
from share_compute_actors.inference.messages import Held, ServingSetup
from share_compute_actors.inference.ranks import DividedShard, ServingRanks
from share_compute_actors.inference.step_engine import StepEngine
from share_compute_actors.machine.device import measured_device
from share_compute_actors.messages import Sources, server_source

if TYPE_CHECKING:
    from share_compute_actors.inference.compiled_stage import StageCompiler


def load_shard(
    engine: StepEngine,
    setup: ServingSetup,
    weights: Any,
    shard: Shard,
    ranks: ServingRanks | None,
    compiler: StageCompiler | None,
    *,
    keeps_plain: bool,
    is_awaited: bool,
) -> Held:
    """Load a shard into a member's engine, and drop the previous one; call this function on the compute thread.

    Args:
        engine: engine of the member.
        setup: parameters of the member.
        weights: the `ServedWeights` actor.
        shard: layers of the model.
        ranks: other processes that compute the shard together with this one; None if there are none. They load a whole
            new shard, which is sealed at once.
        compiler: compiles the shard; None if the deployment computes eagerly.
        keeps_plain: see `ServingMember.load`.
        is_awaited: see `ServingMember.load`.

    Raises:
        ShareComputeError: see `build_shard` and `fill_shard`.
        CompilerFailed: this machine cannot compile the shard.
    """
    loaded_bytes = 0
    if compiler is not None:
        compiler.require()
    engine.keeps_plain = keeps_plain
    if ranks is not None and not ranks.process_ids:
        engine.stage = None  # the ranks ended after an error
        gc.collect()  # exceptions may refer to frames that hold its tensors
    if engine.stage is not None:
        engine.stage.clear()
        if not keeps_plain:  # frees the unpacked weights before anything is loaded
            engine.stage.seal(keeps_plain=False)
    if engine.stage is None or engine.stage.shard != shard:
        if ranks is not None:
            engine.stage = None
        stage, missing = build_shard(setup, weights, shard, engine.stage, ranks)
        engine.stage = None  # frees the memory of parts that are not reused
        if compiler is not None:
            compiler.drop()
        loaded_bytes = sum(tensor.nbytes for tensor in missing.values())
        fill_shard(setup, weights, stage, missing)
        engine.stage = stage
        if ranks is not None or not (is_awaited and stage.draws):
            with fits(shard, setup.name):
                stage.seal(keeps_plain=keeps_plain)
                stage.warm_up()
    if compiler is not None:
        seal_now(engine)
        compiler.compile(engine.stage)
    trim()  # freed KV caches of the previous epoch must not count as resident
    is_elsewhere = setup.device != "cpu"
    resident_bytes = None if is_elsewhere else psutil.Process().memory_info().rss
    if resident_bytes is not None and ranks is not None:
        resident_bytes += ranks.resident_bytes
    if resident_bytes is not None and keeps_plain and not engine.stage.is_sealed:
        resident_bytes += sum(
            tensor.nbytes for name, tensor in engine.stage.tensors().items() if not is_quantized(name)
        )
    return Held(loaded_bytes, Holding(engine.stage.bytes_per_token, resident_bytes))


def seal_now(engine: StepEngine) -> EngineStage:
    """Seal the shard of a member if it is not sealed yet, and return it; call this on the compute thread."""
    assert engine.stage is not None
    if not engine.stage.is_sealed:
        engine.stage.seal(keeps_plain=engine.keeps_plain)
    return engine.stage


def build_shard(
    setup: ServingSetup,
    weights: Any,
    shard: Shard,
    before: EngineStage | None,
    ranks: ServingRanks | None = None,
) -> tuple[EngineStage, dict[str, Tensor]]:
    """Build a shard's module, and return it with the tensors that must still be loaded, by stored name.

    Args:
        setup: parameters of the member.
        weights: the `ServedWeights` actor.
        shard: layers of the model.
        before: the member's current module, whose tensors are reused and which is unusable afterwards; None if there
            is none.
        ranks: see `load_shard`.

    Raises:
        ContributorLost: this process does not see the GPU that was measured, or a rank was lost.
        PlanInfeasible: the shard does not fit into this machine's memory.
        UserError: the model cannot be served.
    """
    torch.set_num_threads(setup.own_threads)
    with fits(shard, setup.name):
        stage = _stage(setup, weights, shard, ranks)
        return stage, stage.tensors() if before is None else stage.take_over(before)


def _stage(setup: ServingSetup, weights: Any, shard: Shard, ranks: ServingRanks | None) -> EngineStage:
    config = setup.blueprint.config or {}
    device = measured_device(setup.device, setup.gpus, setup.lent_devices)
    quantizes = setup.dtype == "int8"
    dtype: torch.dtype = torch.float32 if quantizes else getattr(torch, setup.dtype)
    if setup.pooling is not None:
        from share_compute.inference.runtime.encoder_stage import EncoderStage  # noqa: PLC0415 - slow to import

        return EncoderStage(
            config, shard, device, dtype, window_tokens=setup.window_tokens, pooling=setup.pooling
        )
    from share_compute.inference.runtime.stage import ServingStage  # noqa: PLC0415 - transformers is slow to import

    tokenizer = _tokenizer(weights) if shard.is_last else None
    if ranks is not None:
        divided = DividedShard(
            config=config,
            shard=shard,
            dtype=str(dtype).removeprefix("torch."),
            quantizes=quantizes,
            window_tokens=setup.window_tokens,
        )
        return ranks.divide(divided, tokenizer=tokenizer, device=device)
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
