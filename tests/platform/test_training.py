"""Optimizers, learning rates and gradient buckets against plain torch."""

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import get_scheduler

from share_compute.specification import SCHEDULES, OptimizerName, OptimizerSpec, ScheduleSpec, TrainingSpec
from share_compute.training.gradients import GradientBuckets, clip_factor
from share_compute.training.optimizers import (
    build_optimizer,
    learning_rates,
    optimizer_tensors,
    restore_optimizer,
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        torch.manual_seed(step)
        module(torch.rand(4, 6)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("name", list(OptimizerName))
def test_restored_state_goes_on_as_if_never_stopped(name: OptimizerName) -> None:
    spec = OptimizerSpec(name=name, learning_rate=0.01, weight_decay=0.1)
    straight = model()
    optimizer = build_optimizer(spec, straight.parameters())
    train(straight, optimizer, range(3))
    names = dict(straight.named_parameters())
    state = {key: value.clone() for key, value in optimizer_tensors(optimizer, names).items()}
    full_size = sum(1 for key, value in state.items() if key.startswith("0.weight") and value.dim())
    assert full_size == name.state_tensors
    resumed = model()
    resumed.load_state_dict(straight.state_dict())
    second = build_optimizer(spec, resumed.parameters())
    restore_optimizer(second, dict(resumed.named_parameters()), state)
    train(straight, optimizer, range(3, 6))
    train(resumed, second, range(3, 6))
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_those_of_transformers(name: str) -> None:
    spec = TrainingSpec(steps=12, schedule=ScheduleSpec(name=name, warmup_steps=3))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=spec.optimizer.learning_rate)
    schedule = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=12)
    rate = learning_rates(spec)
    for step in range(1, 13):
        assert rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        schedule.step()


def test_buckets_hold_the_gradients() -> None:
    plain, flat = model(), model()
    buckets = GradientBuckets(dict(flat.named_parameters()), bucket_bytes=80)
    full: list[int] = []
    buckets.zero()
    buckets.watch(full.append)
    inputs = torch.rand(4, 6)
    plain(inputs).square().sum().backward()
    flat(inputs).square().sum().backward()
    assert sorted(full) == list(range(len(buckets.buckets)))
    assert len(buckets.buckets) > 1
    for one, other in zip(plain.parameters(), flat.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    norm = math.sqrt(buckets.squared_norm())
    assert norm == pytest.approx(float(clip_grad_norm_(plain.parameters(), 0.1)), rel=1e-6)
    buckets.scale(clip_factor(norm, 0.1))
    for one, other in zip(plain.parameters(), flat.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-6)  # type: ignore[arg-type]


def test_small_gradients_are_not_scaled() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
