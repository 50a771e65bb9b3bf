"""Optimizers, learning rates, loss scales and text samples against plain torch and transformers."""

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, get_scheduler

from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.factory import build_stage
from share_compute.shards import Shard
from share_compute.specification import (
    SCHEDULES,
    EarlyStoppingSpec,
    Metric,
    OptimizerName,
    OptimizerSpec,
    ScheduleSpec,
    TargetSpec,
    TrainingSpec,
)
from share_compute.training.early_stopping import EarlyStopping, reaches
from share_compute.training.gradients import clip_factor
from share_compute.training.loss_scale import SKIPPED, first_loss_scale, update_factor
from share_compute.training.optimizers import (
    build_optimizer,
    learning_rates,
    optimizer_tensors,
    restore_optimizer,
    undecayed_parameters,
)
from share_compute.training.sampling import continue_greedily


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
    optimizer = build_optimizer(spec, straight.parameters(), undecayed_parameters(straight))
    train(straight, optimizer, range(3))
    names = dict(straight.named_parameters())
    state = {key: value.clone() for key, value in optimizer_tensors(optimizer, names).items()}
    full_size = sum(1 for key, value in state.items() if key.startswith("0.weight") and value.dim())
    assert full_size == name.state_tensors
    resumed = model()
    resumed.load_state_dict(straight.state_dict())
    second = build_optimizer(spec, resumed.parameters(), undecayed_parameters(resumed))
    restore_optimizer(second, dict(resumed.named_parameters()), state)
    train(straight, optimizer, range(3, 6))
    train(resumed, second, range(3, 6))
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


OPTIONS: dict[str, dict[str, float | str]] = {
    "cosine": {"num_cycles": 0.75},
    "cosine_with_restarts": {"num_cycles": 2},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5, "warmup_lr_rate": 0.01},
    "polynomial": {"power": 2.0, "lr_end": 1e-5},
    "inverse_sqrt": {"timescale": 5},
    "warmup_stable_decay": {"num_decay_steps": 4, "decay_type": "1-sqrt"},
}


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"reduce_on_plateau"}))
def test_learning_rates_are_those_of_transformers(name: str) -> None:
    options = OPTIONS.get(name, {})
    spec = TrainingSpec(steps=12, schedule=ScheduleSpec(name=name, warmup_steps=3, options=options))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=spec.optimizer.learning_rate)
    schedule = get_scheduler(
        name, optimizer, num_warmup_steps=3, num_training_steps=12, scheduler_specific_kwargs=options
    )
    rate = learning_rates(spec)
    for step in range(1, 13):
        assert rate(step) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()


def test_small_gradients_are_not_scaled() -> None:
    assert clip_factor(0.5, 1.0) == 1.0


class TestDecay:
    def shard(self, start: int, stop: int) -> nn.Module:
        config = CONFIG_MAPPING["qwen3"](
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            vocab_size=32, head_dim=8, attention_bias=True,
        ).to_dict()  # fmt: skip
        blueprint = Blueprint(config={**config, "model_type": "qwen3"})
        return build_stage(blueprint, Shard("m", start, stop, 2), torch.device("cpu")).module

    def test_biases_and_norms_do_not_decay_wherever_the_cut_is(self) -> None:
        whole = self.shard(0, 2)
        names = {parameter: name for name, parameter in whole.named_parameters()}
        undecayed = {names[parameter] for parameter in undecayed_parameters(whole)}
        layer = "model.layers.1"
        assert f"{layer}.self_attn.q_proj.bias" in undecayed
        assert {f"{layer}.input_layernorm.weight", f"{layer}.self_attn.k_norm.weight"} <= undecayed
        assert "model.norm.weight" in undecayed
        assert {f"{layer}.mlp.up_proj.weight", "model.embed_tokens.weight"} & undecayed == set()
        parts = set()
        for part in (self.shard(0, 1), self.shard(1, 2)):
            own = {parameter: name for name, parameter in part.named_parameters()}
            parts |= {own[parameter] for parameter in undecayed_parameters(part)}
        assert parts == undecayed

    def test_declared_norms_do_not_decay(self) -> None:
        module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
        assert set(undecayed_parameters(module)) == {module[1].weight, module[1].bias}

    @pytest.mark.parametrize(("decays", "bias_after"), [("matrices", 1.0), ("all", 0.9)])
    def test_only_what_decays_gets_smaller(
        self, decays: Literal["matrices", "all"], bias_after: float
    ) -> None:
        module = nn.Linear(3, 3)
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)
        spec = OptimizerSpec(learning_rate=1.0, weight_decay=0.1, decays=decays)
        optimizer = build_optimizer(spec, module.parameters(), undecayed_parameters(module))
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.allclose(module.weight, torch.full((3, 3), 0.9))
        assert torch.allclose(module.bias, torch.full((3,), bias_after))

    @pytest.mark.parametrize("name", list(OptimizerName))
    def test_the_l1_penalty_is_added_to_the_gradient(self, name: OptimizerName) -> None:
        spec = OptimizerSpec(name=name, learning_rate=0.01, l1=0.03, weight_decay=0.1)
        ours, theirs = model(), model()
        with torch.no_grad():
            for module in (ours, theirs):
                next(module.parameters())[:1].zero_()  # if a weight is 0, so is its penalty's gradient
        optimizer = build_optimizer(spec, ours.parameters(), undecayed_parameters(ours))
        plain = build_optimizer(
            spec.model_copy(update={"l1": 0.0}), theirs.parameters(), undecayed_parameters(theirs)
        )
        for step in range(3):
            torch.manual_seed(step)
            inputs = torch.rand(4, 6)
            optimizer.zero_grad()
            ours(inputs).square().sum().backward()
            optimizer.step()
            plain.zero_grad()
            penalty = 0.03 * sum(weight.abs().sum() for weight in theirs.parameters() if weight.dim() > 1)
            (theirs(inputs).square().sum() + penalty).backward()
            plain.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-6)

    def test_the_l1_penalty_makes_weights_zero(self) -> None:
        weight = nn.Parameter(torch.tensor([[0.5, -0.25]]))
        optimizer = build_optimizer(
            OptimizerSpec(name=OptimizerName.sgd, learning_rate=0.125, l1=1.0), [weight]
        )
        for _ in range(4):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        assert weight.tolist() == [[0.0, 0.0]]


class TestLossScale:
    def test_it_is_one_but_for_float16(self) -> None:
        scale = first_loss_scale("bfloat16")
        assert scale.after(1.0, 1) == scale
        assert scale.factor == 1.0
        assert first_loss_scale("float16").factor == 2.0**16

    @given(st.lists(st.booleans(), min_size=1, max_size=25))
    def test_it_moves_as_torch_moves_it(self, skipped: list[bool]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2000)
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        scale = replace(first_loss_scale("float16"), clean_steps=1990)
        scaler.scale(weight)  # its step counter begins at its first use
        scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1990})
        for step, is_skipped in enumerate(skipped, start=1):
            weight.grad = torch.full((1,), torch.inf if is_skipped else 1.0)
            scaler.step(optimizer)
            scaler.update()
            scale = scale.after(SKIPPED if is_skipped else 0.5, step)
            assert (scale.factor, scale.clean_steps) == (
                scaler.get_scale(),
                scaler.state_dict()["_growth_tracker"],
            )

    def test_it_gives_up_when_no_scale_helps(self) -> None:
        scale = first_loss_scale("float16")
        for step in range(1, 31):
            scale = scale.after(SKIPPED, step)
        with pytest.raises(UserError, match="not finite up to step 31") as caught:
            scale.after(SKIPPED, 31)
        assert caught.value.hint

    def test_a_step_is_clipped_skipped_or_refused(self) -> None:
        assert update_factor(0.5, 1.0, "float32", 3) == 1.0
        assert update_factor(2.0, 1.0, "float32", 3) == clip_factor(2.0, 1.0)
        assert update_factor(2.0, None, "float32", 3) == 1.0
        assert update_factor(math.inf, 1.0, "float16", 3) == SKIPPED
        assert update_factor(math.nan, None, "float16", 3) == SKIPPED
        with pytest.raises(UserError, match="not finite at step 3"):
            update_factor(math.nan, 1.0, "bfloat16", 3)


def lost(loss: float) -> dict[Metric, float]:
    return {"validation_loss": loss}


class TestEarlyStopping:
    def test_it_stops_when_patience_is_over(self) -> None:
        state = EarlyStopping(EarlyStoppingSpec(patience=2, min_delta=0.1))
        state = state.after(10, lost(3.0)).after(20, lost(2.0))
        assert not state.stops
        state = state.after(30, lost(1.95))
        assert not state.stops
        state = state.after(40, lost(math.nan))
        assert state.stops
        assert state.reason == "validation loss has not fallen below 2.0000 (step 20) in 2 validations"

    def test_accuracy_must_rise(self) -> None:
        state = EarlyStopping(EarlyStoppingSpec(metric="accuracy", patience=2))
        state = state.after(1, {"accuracy": 0.5}).after(2, {"accuracy": 0.7}).after(3, {"accuracy": 0.6})
        assert not state.stops
        state = state.after(4, {"validation_loss": 0.1})  # no value of the metric
        assert state.stops
        assert state.reason == "accuracy has not risen above 0.7000 (step 2) in 2 validations"

    def test_a_metric_without_any_value(self) -> None:
        state = EarlyStopping(EarlyStoppingSpec(metric="auroc", patience=1)).after(1, lost(1.0))
        assert state.stops
        assert state.reason == "no validation has a value of auroc"

    @given(st.lists(st.floats(0, 10), max_size=20), st.integers(0, 20))
    def test_a_resumed_job_stands_where_it_stood(self, losses: list[float], cut: int) -> None:
        numbered = [(step, lost(loss)) for step, loss in enumerate(losses)]
        state = EarlyStopping(EarlyStoppingSpec(patience=3))
        assert state.after_all(numbered[:cut]).after_all(numbered[cut:]) == state.after_all(numbered)

    @pytest.mark.parametrize(
        ("metric", "value", "is_reached"),
        [
            ("accuracy", 0.9, True),
            ("accuracy", 0.89, False),
            ("rmse", 0.9, True),
            ("rmse", 0.91, False),
            ("f1", 1, False),
        ],
    )
    def test_a_target_is_reached_from_its_own_side(
        self, metric: Metric, value: float, is_reached: bool
    ) -> None:
        figures: dict[Metric, float] = {} if metric == "f1" else {metric: value}
        assert reaches(TargetSpec(metric=metric, value=0.9), figures) == is_reached


class TestSampling:
    def test_it_goes_on_as_transformers_does(self) -> None:
        config = CONFIG_MAPPING["llama"](
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=40,
            max_position_embeddings=64, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(4)
        own = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        prompt = [5, 6, 7]
        expected = own.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, 3:].tolist()
        with torch.no_grad():
            made = continue_greedily(lambda ids: own(input_ids=ids).logits[0, -1], prompt, 12, ends=(2,))
        assert made == [token for token in expected if token != 2]

    def test_it_ends_where_the_text_ends_and_keeps_to_the_window(self) -> None:
        seen: list[list[int]] = []

        def next_number(ids: torch.Tensor) -> torch.Tensor:
            seen.append(ids[0].tolist())
            return nn.functional.one_hot(ids[0, -1] + 1, 10).float()

        assert continue_greedily(next_number, [1, 2], 100, window=3, ends=(7,)) == [3, 4, 5, 6]
        assert seen == [[1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
        assert continue_greedily(next_number, [1], 2) == [2, 3]
