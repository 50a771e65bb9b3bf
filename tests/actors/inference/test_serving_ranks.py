"""Ranks of a member serve together as one process does, and a lost rank ends the member."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import psutil
import pytest
import torch
from tests.platform.inference.runtime.stages import (
    CPU,
    LAYERS,
    Serving,
    fill,
    generated,
    model_of,
    opening,
    prompt_of,
    small_config,
    stages_of,
)
from torch import Tensor

from share_compute.errors import ContributorLost, OutOfMemory, ShareComputeError, UserError
from share_compute.inference.runtime.stage import ServingStage
from share_compute.inference.runtime.tensor_stage import LeadingStage
from share_compute.shards import Shard
from share_compute_actors.group.ranks.exchange import Exchange, exchange_bytes
from share_compute_actors.group.ranks.processes import ONE_CPU, RankDevices
from share_compute_actors.inference.ranks import DividedShard, ServingRanks
from share_compute_actors.machine.cores import share_cores

TOKENS = 12
KEEPS_PLAIN = (True, False)
PROMPTS = {sequence: prompt_of(12 + 7 * sequence, sequence) for sequence in range(3)}
together = pytest.mark.xdist_group("ranks")


def shard_of(config: dict[str, Any], cut: tuple[int, int] = (0, LAYERS), **options: Any) -> DividedShard:
    shard = Shard("m", *cut, LAYERS)
    return DividedShard(
        **{
            "config": config,
            "shard": shard,
            "dtype": "float32",
            "quantizes": False,
            "window_tokens": 128,
            **options,
        }
    )


def texts(*stages: ServingStage) -> tuple[dict[int, list[int]], list[float]]:
    """Return the tokens of each sequence, and the log-probabilities of all."""
    serving = Serving(stages)
    plans = {
        opening(sequence, prompt, logprobs=0): [5, len(prompt) - 5] for sequence, prompt in PROMPTS.items()
    }
    found = serving.run(plans, TOKENS)
    return found, [one.logprob or 0.0 for one in serving.sampled]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[ServingRanks]:
    found = ServingRanks(request.param, request.param, 120)
    yield found
    found.close()


def divided(
    ranks: ServingRanks, model_type: str, cut: tuple[int, int] = (0, LAYERS), **wider: Any
) -> LeadingStage:
    stage = ranks.divide(shard_of({**small_config(model_type), **wider}, cut))
    assert stage.bytes_per_token == ServingStage(small_config(model_type), stage.shard, CPU).bytes_per_token
    return stage


def require_same(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-5)


@pytest.mark.slow
@together
@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "gemma2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_ranks_draw_the_tokens_of_one_process(ranks: ServingRanks, model_type: str) -> None:
    if small_config(model_type).get("num_key_value_heads", 4) % ranks.count:
        with pytest.raises(UserError, match="4 ranks cannot share 2 KV heads evenly"):
            ranks.divide(shard_of(small_config(model_type)))
        return
    expected = texts(*stages_of(model_type, [(0, LAYERS)]))
    assert expected[0] == {
        one: generated(model_type, tuple(prompt), TOKENS) for one, prompt in PROMPTS.items()
    }
    stage = divided(ranks, model_type)
    fill(stage, model_of(model_type), *KEEPS_PLAIN)
    require_same(texts(stage), expected)
    stage.clear()
    require_same(texts(stage), expected)
    first, _ = stages_of(model_type, [(0, 1), (1, LAYERS)])
    second = divided(ranks, model_type, (1, LAYERS))  # gets hidden states
    fill(second, model_of(model_type), *KEEPS_PLAIN[1:])
    require_same(texts(first, second), expected)


@pytest.mark.slow
@together
def test_other_types_of_weights_are_divided() -> None:
    ranks = ServingRanks(2, 2, 120)
    options: list[dict[str, Any]] = [{"quantizes": True}, {"dtype": "bfloat16"}]
    for model_type, other in product(["llama", "mixtral", "qwen2_moe", "qwen3_moe"], options):
        config, dtype = small_config(model_type), getattr(torch, other.get("dtype", "float32"))
        alone = ServingStage(
            config, Shard("m", 0, LAYERS, LAYERS), CPU, dtype, quantizes="quantizes" in other
        )
        stage = ranks.divide(shard_of(config, **other))
        source = torch.Generator().manual_seed(2)
        for name, tensor in alone.tensors().items():
            if tensor.dtype == torch.int8:
                drawn: Tensor = torch.randint(-127, 128, tensor.shape, generator=source, dtype=torch.int8)
            else:
                drawn = torch.rand(tensor.shape, generator=source) * (0.002 if "scale" in name else 0.3)
            tensor.copy_(drawn)
            stage.tensors()[name].copy_(drawn)
        found = []
        for each in (alone, stage):
            each.seal()
            serving = Serving([each])
            serving.run({opening(0, PROMPTS[0], logprobs=0): [len(PROMPTS[0])]}, 1)
            found.append(serving.sampled[0].logprob)
        assert found[1] == pytest.approx(found[0], abs=0.05)
    ranks.close()


@pytest.mark.slow
@together
def test_a_lost_rank_ends_the_member() -> None:
    lost: list[ShareComputeError] = []
    before = set(psutil.Process().children())
    ranks = ServingRanks(2, 2, 120, lost.append)
    stage = ranks.divide(shard_of(small_config("llama")))
    fill(stage, model_of("llama"))
    texts(stage)
    (child,) = set(psutil.Process().children()) - before
    assert ranks.process_ids == [child.pid]
    assert ranks.resident_bytes > 0
    os.kill(child.pid, signal.SIGKILL)
    stage_again = Serving([stage])
    with pytest.raises(ContributorLost, match="rank 1 was ended by signal 9"):
        stage_again.run({opening(9, PROMPTS[0]): [len(PROMPTS[0])]}, 1)
    assert [each.details for each in lost] == [{"ends_member": True}]
    ranks.divide(shard_of(small_config("llama")))  # new processes
    assert ranks.process_ids
    ranks.close()


def cores_of(process_id: int) -> list[int]:
    return sorted(os.sched_getaffinity(process_id))


@pytest.mark.slow
@together
@pytest.mark.parametrize("has_own_memory", [False, True])
def test_ranks_compute_on_devices_of_their_own(has_own_memory: bool) -> None:
    """Parts of a CPU; with gloo, ranks exchange tensors as GPUs do with NCCL."""
    lost: list[ShareComputeError] = []
    ranks = ServingRanks(2, 2, 120, lost.append, RankDevices("cpu", 2, has_own_memory))
    expected = texts(*stages_of("llama", [(0, LAYERS)]))
    stage = divided(ranks, "llama")
    fill(stage, model_of("llama"), *KEEPS_PLAIN)
    require_same(texts(stage), expected)
    assert [cores_of(each) for each in ranks.process_ids] == [sorted(share_cores(2)[1]) or cores_of(0)]
    os.kill(ranks.process_ids[0], signal.SIGKILL)
    with pytest.raises(ContributorLost, match="rank 1 was ended by signal 9"):
        Serving([stage]).run({opening(9, PROMPTS[0]): [len(PROMPTS[0])]}, 1)
    assert {each.message.partition(":")[0] for each in lost} == {"rank 1 was ended by signal 9"}
    ranks.close()


@pytest.mark.slow
@together
def test_the_end_of_a_rank_is_reported_while_no_rank_is_needed() -> None:
    """As on GPUs, where a sum with a rank that ended blocks."""
    lost: queue.SimpleQueue[ShareComputeError] = queue.SimpleQueue()
    ranks = ServingRanks(2, 2, 120, lost.put, RankDevices("cpu", 2, has_own_memory=True))
    divided(ranks, "llama")
    os.kill(ranks.process_ids[0], signal.SIGKILL)
    assert "rank 1 was ended by signal 9" in lost.get(timeout=60).message
    ranks.close()


@pytest.mark.slow
@pytest.mark.gpu
@together
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
@pytest.mark.parametrize(
    ("model_type", "options"),
    [("llama", {}), ("llama", {"dtype": "bfloat16"}), ("gpt_neox", {}), ("mixtral", {})],
)
def test_ranks_serve_on_gpus_of_their_own(model_type: str, options: dict[str, Any]) -> None:
    dtype = getattr(torch, options.get("dtype", "float32"))
    whole = Shard("m", 0, LAYERS, LAYERS)
    alone = ServingStage(small_config(model_type), whole, torch.device("cuda"), dtype)
    fill(alone, model_of(model_type), *KEEPS_PLAIN)
    ranks = ServingRanks(2, 2, 120, devices=RankDevices.of("cuda", 2))
    stage = ranks.divide(shard_of(small_config(model_type), **options), device=torch.device("cuda"))
    fill(stage, model_of(model_type), *KEEPS_PLAIN)
    assert stage.device.type == "cuda"
    found, expected = texts(stage), texts(alone)
    assert found[1][:1] == pytest.approx(expected[1][:1], abs=0.05)
    if not options:
        assert found[0] == expected[0]
    ranks.close()


@pytest.mark.slow
@pytest.mark.gpu
@together
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two CUDA devices here")
def test_a_gpu_without_memory_is_reported_while_the_other_waits_for_it() -> None:
    lost: queue.SimpleQueue[ShareComputeError] = queue.SimpleQueue()
    ranks = ServingRanks(2, 2, 120, lost.put, RankDevices.of("cuda", 2))
    stage = ranks.divide(shard_of(small_config("llama")), device=torch.device("cuda"))
    fill(stage, model_of("llama"))
    free_bytes, _ = torch.cuda.mem_get_info(1)
    taken = torch.empty(free_bytes - (1 << 28), dtype=torch.uint8, device="cuda:1")
    grown = replace(opening(9, PROMPTS[0]), capacity_tokens=1 << 22)

    def compute() -> None:
        with suppress(ShareComputeError, RuntimeError):
            Serving([stage]).run({grown: [len(PROMPTS[0])]}, 1)

    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    assert isinstance(lost.get(timeout=60), OutOfMemory)
    ranks.close()  # ends the sum in which the first rank waits
    computing.join(60)
    assert not computing.is_alive()
    assert taken.is_cuda


@pytest.mark.slow
@together
@pytest.mark.parametrize("has_own_memory", [False, True])
def test_a_rank_without_memory_is_no_lost_rank(has_own_memory: bool) -> None:
    lost: list[ShareComputeError] = []
    devices = RankDevices("cpu", 2, has_own_memory=True) if has_own_memory else ONE_CPU
    ranks = ServingRanks(2, 2, 120, lost.append, devices)
    stage = ranks.divide(shard_of(small_config("llama")))
    fill(stage, model_of("llama"))
    child = psutil.Process(ranks.process_ids[0])
    child.rlimit(psutil.RLIMIT_AS, (child.memory_info().vms,) * 2)
    grown = replace(opening(9, PROMPTS[0]), capacity_tokens=1 << 20)
    with pytest.raises(OutOfMemory, match="in rank 1"):
        Serving([stage]).run({grown: [len(PROMPTS[0])]}, 1)
    # With devices of their own, the end of the rank may have been reported before the sum failed.
    assert len(lost) <= has_own_memory
    assert all(isinstance(each, OutOfMemory) for each in lost)
    stage = divided(ranks, "llama")  # new processes
    fill(stage, model_of("llama"))
    require_same(texts(stage), texts(*stages_of("llama", [(0, LAYERS)])))
    ranks.close()


def test_sums_have_the_same_bits_on_all_ranks() -> None:
    count, numbers = 3, (1 << 20) + 7
    memory = torch.zeros(exchange_bytes(count), dtype=torch.uint8)
    ends: dict[int, list[socket.socket]] = {rank: [] for rank in range(count)}
    for pair in combinations(range(count), 2):
        for rank, end in zip(pair, socket.socketpair(), strict=True):
            ends[rank].append(end)
    groups = [Exchange(rank, ends[rank], memory, 60) for rank in range(count)]
    parts = torch.randn(count, 2, numbers)

    def play(rank: int) -> list[Tensor]:
        group, part = groups[rank], parts[rank]
        small = [group.sum(part[:, :5].to(torch.bfloat16)) for _ in range(3)]
        assert group.gather(part[:0]).numel() == 0  # no sequence draws
        return [group.sum(part), *small, group.gather(part[:, :3])]

    with ThreadPoolExecutor(count) as pool:
        whole, *others = pool.map(play, range(count))
    expected: list[Callable[[Tensor], Tensor]] = [
        lambda p: p,
        *[lambda p: p[:, :, :5].bfloat16().float()] * 3,
    ]
    for place, of in enumerate(expected):
        own = of(parts)
        assert torch.equal(whole[place].float(), (own[0] + own[1] + own[2]).to(whole[place].dtype).float())
        assert all(torch.equal(whole[place], other[place]) for other in others)
    assert torch.equal(whole[-1], torch.cat(list(parts[:, :, :3]), -1))
    for group in groups:
        group.close()
