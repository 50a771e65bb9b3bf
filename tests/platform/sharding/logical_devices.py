"""Program that runs sharded layers and functions on four processes, and writes what it found as JSON.

The processes are forked from one that has imported all and made the plans. Usage: logical_devices.py FOLDER
"""

from __future__ import annotations

import copy
import json
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaModel, ViTConfig, ViTModel

import share_compute
from share_compute.errors import UserError
from share_compute.models.blueprint import Blueprint
from share_compute.models.objective import Objective
from share_compute.planning.operators.cost import DeviceGroup
from share_compute.planning.operators.graph import OperatorGraph
from share_compute.planning.operators.plan import LayerOperators, plan_layer
from share_compute.planning.operators.strategies import options_of
from share_compute.planning.operators.trace import layer_graphs, trace
from share_compute.sharding.execution import ShardedLayer, ShardedLayers
from share_compute.sharding.layouts import sum_in_order

PAGE = Path(__file__).parents[3] / "docs" / "operators.md"
STEPS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 4, **SIZES}
VIT = {"model_type": "vit", "image_size": 32, "patch_size": 8, **SIZES}


@dataclass
class Case:
    """Layers of a model, and the plans with which they run."""

    layers: list[nn.Module]
    shape: tuple[int, ...]
    """Shape of the hidden states."""
    options: dict[str, Any] = field(default_factory=dict)
    plans: dict[str, LayerOperators] = field(default_factory=dict)
    """Plans by name; the name ends with the number of devices."""


def searched(graph: OperatorGraph, places: tuple[int, ...]) -> dict[str, LayerOperators]:
    """Return plans of a layer that the search chose, and plans of drawn strategies."""
    found = {}
    for devices in (2, 4):
        slow = DeviceGroup(devices, 1e9, 1e11, 1e10, 1e-7)
        found[f"searched_{devices}"] = plan_layer(graph, slow, layers=places)
        for seed in range(2):
            draw = random.Random(seed)
            fixed = {
                each.name: draw.choice(options_of(each, graph, devices).names)
                for each in graph.operators
                if each.kind != "input"
            }
            # The last plan is that of a single layer, whose input and output are whole.
            layers = places if seed == 0 else (0,)
            found[f"drawn{seed}_{devices}"] = plan_layer(graph, slow, layers=layers, fixed=fixed)
    return found


def llama() -> Case:
    model = LlamaModel(LlamaConfig(**LLAMA))
    ((graph, places),) = layer_graphs(Blueprint(config=LLAMA), batch=4, length=16)
    rotary = model.rotary_emb(torch.zeros(1), torch.arange(16)[None])
    options = {"position_embeddings": rotary, "attention_mask": None}
    return Case(list(model.layers), (4, 16, 64), options, searched(graph, places))


def vit() -> Case:
    model = ViTModel(ViTConfig(**VIT), add_pooling_layer=False)
    task = Objective(task="image_classification", classes=4)
    ((graph, places),) = layer_graphs(
        Blueprint(config=VIT, objective=task, sample_shape=(3, 32, 32)), batch=4, length=1
    )
    layers = list(model.layers)
    return Case(layers, graph.tensors[graph.output].shape, {}, searched(graph, places))


def trained(case: Case, plan: LayerOperators, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the largest differences between one device and several devices, over some training steps."""
    alone = nn.ModuleList(copy.deepcopy(case.layers)).train()
    hidden = torch.zeros(case.shape)
    own = [copy.deepcopy(layer).train() for layer in case.layers]
    together = ShardedLayers([ShardedLayer(layer, (hidden,), case.options, plan, mesh) for layer in own])
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2, foreach=False) for each in (alone, together)]
    found = {"loss": 0.0, "gradient": 0.0, "relative": 0.0, "input": 0.0}
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        inputs = [torch.randn(case.shape, generator=draw).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        target = torch.randn(case.shape, generator=draw)
        state = inputs[0]
        for layer in alone:
            state = layer(state, **case.options)
        losses = [functional.mse_loss(each, target) for each in (state, together(inputs[1], **case.options))]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        found["loss"] = max(found["loss"], abs(losses[0].item() - losses[1].item()))
        found["input"] = max(found["input"], apart(inputs[0].grad, inputs[1].grad))
        # The gradient of the bias of attention's keys is 0 but for rounding, so the scale has a minimum.
        scale = max(each.grad.abs().max().item() for each in alone.parameters())
        for one, several in zip(alone.parameters(), together.parameters(), strict=True):
            difference = apart(one.grad, several.grad.full_tensor())
            found["gradient"] = max(found["gradient"], difference)
            if step == 0:  # later gradients are those of weights that differ by rounding
                own_scale = max(one.grad.abs().max().item(), 1e-4 * scale)
                found["relative"] = max(found["relative"], difference / own_scale)
        for optimizer in optimizers:
            optimizer.step()
    placements = {
        name: str(value.placements[0]) for name, value in together.layers[0].layer.named_parameters()
    }
    planned = {name: own for each in plan.operators for name, own in each.parameters.items()}
    return {
        **found,
        "placements": placements == {name: read(text) for name, text in planned.items()},
        "strategies": sorted({each.strategy for each in plan.operators}),
        "collectives": sorted({each.collective for each in plan.redistributions if each.collective}),
        "replicated": together.layers[0].replicated,
    }


def read(text: str) -> str:
    return str(Replicate() if text == "Replicate()" else Shard(int(text[6:-1])))


def apart(one: Tensor | None, other: Tensor | None) -> float:
    assert one is not None
    assert other is not None
    return (one - other).abs().max().item()


def product(x: Tensor, weight: Tensor) -> Tensor:
    return functional.silu(x @ weight)


def by_hand(square: DeviceMesh) -> dict[str, bool]:
    """Return whether `shard` gives the bits of DTensor by hand: value, gradients, and placements."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(8, 8, generator=draw) for _ in range(2))
    cases = {
        # Both specs take the first dimension of the mesh.
        "column": (((2, 1), (1, 2)), (2, 2), [[Shard(0), Replicate()], [Shard(1), Replicate()]]),
        "row": (((1, 4), (4, 1)), (4, 1), [[Shard(1), Shard(1)], [Shard(0), Shard(0)]]),
        "propagated": (((2, 1), None), None, [[Shard(0), Replicate()], [Replicate(), Replicate()]]),
    }
    outputs = {"column": [Shard(0), Shard(1)], "row": [Shard(0), Shard(0)]}
    found = {}
    for name, (in_specs, out_specs, placements) in cases.items():
        given = [each.clone().requires_grad_() for each in (x, weight)]
        sharded = share_compute.shard(product, in_specs, out_specs, 4)(*given)
        manual = [
            distribute_tensor(each, square, own).requires_grad_()
            for each, own in zip((x, weight), placements, strict=True)
        ]
        expected = product(*manual)
        if name in outputs:
            expected = expected.redistribute(square, outputs[name])
        for each in (sharded, expected):
            each.square().full_tensor().sum().backward()
        found[name] = (
            sharded.placements == expected.placements
            and torch.equal(sharded.to_local(), expected.to_local())
            and all(
                torch.equal(one.grad, other.grad.full_tensor())
                for one, other in zip(given, manual, strict=True)
            )
        )
    return found


def of_a_module(mesh: DeviceMesh) -> bool:
    """Return whether a module with cut parameters gives the bits of DTensor's own calls."""
    torch.manual_seed(0)
    module = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    values = [each.detach().clone() for each in (module.weight, module.bias)]
    specs = {"weight": (4, 1), "bias": (4,)}
    found = share_compute.shard(module, ((1, 1),), ((1, 4),), mesh, parameter_specs=specs)(x)
    weight, bias = (distribute_tensor(each, mesh, [Shard(0)]) for each in values)
    whole = distribute_tensor(x, mesh, [Replicate()])
    expected = functional.linear(whole, weight, bias).redistribute(mesh, [Shard(1)])
    assert isinstance(module.weight, DTensor)
    return torch.equal(found.to_local(), expected.to_local()) and found.placements == expected.placements


def tied_together(mesh: DeviceMesh) -> bool:
    """Return whether two layers with one weight have one weight after a step, too."""
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    module[1].weight = module[0].weight
    cut = share_compute.shard(module, ((1, 1),), ((1, 1),), mesh, parameter_specs={"1.weight": (4, 1)})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    cut(torch.ones(4, 8)).full_tensor().sum().backward()
    optimizer.step()
    return module[0].weight is module[1].weight and module[0].weight.placements == (Shard(0),)


def summed_in_order(mesh: DeviceMesh) -> bool:
    """Return whether sums have the bits of additions in float32, one device after the other."""
    found = True
    for dtype in (torch.float32, torch.bfloat16):
        given = [
            torch.randn(5, 7, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)
        ]
        total = given[0].float()
        for each in given[1:]:
            total = total + each.float()
        own = given[mesh.get_local_rank()]
        found &= torch.equal(sum_in_order(own, mesh), total.to(dtype))
    return found


class Masking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape[0], 1, device=x.device)


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=True)


def refused(cases: Mapping[str, Case], mesh: DeviceMesh) -> dict[str, list[str | None]]:
    """Return message and hint of each call with wrong arguments."""
    x = torch.zeros(6, 8)
    shard = share_compute.shard
    case = cases["llama"]
    plan, other = case.plans["drawn1_4"], cases["vit"].plans["drawn1_4"]
    layer, hidden = copy.deepcopy(case.layers[0]), torch.zeros(case.shape)
    whole = ShardedLayer(copy.deepcopy(layer), (hidden,), case.options, plan, mesh)
    asking = tree_map(
        lambda leaf: leaf.clone().requires_grad_() if isinstance(leaf, Tensor) else leaf, case.options
    )
    masking = plan_layer(trace(Masking(), (x,), {}, name="Masking"), DeviceGroup(4, 1e9, 1e9, 1e9, 0))
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    two_specs = {"0.weight": (4, 1), "1.weight": (1, 4)}
    dropping = plan_layer(trace(Dropping(), (x,), {}, name="Dropping"), DeviceGroup(4, 1e9, 1e9, 1e9, 0))
    runs: dict[str, Callable[[], Any]] = {
        "indivisible": lambda: shard(product, ((4, 1), None), None, mesh)(x, x),
        "dimensions": lambda: shard(product, ((2,), None), None, mesh)(x, x),
        "too_many_parts": lambda: shard(product, ((2, 4), None), None, mesh)(x, x),
        "too_few_specs": lambda: shard(product, ((2, 1),), None, 4)(x, x),
        "outputs": lambda: shard(product, None, ((1, 1), (1, 1)), 4)(x, x.T),
        "no_tensor": lambda: shard(product, (None, (1, 1)), None, 4)(x, 2.0),
        "does_not_fit": lambda: shard(product, ((1, 2), None), None, mesh)(x, x),
        "mesh_too_large": lambda: shard(product, None, None, (2, 4)),
        "mesh_too_small": lambda: shard(product, None, None, 2),
        "mesh_of_nothing": lambda: shard(product, None, None, 0),
        "no_parameter": lambda: shard(nn.Linear(2, 2), None, None, mesh, parameter_specs={"w": (1,)}),
        "other_plan": lambda: ShardedLayer(layer, (hidden,), case.options, other, mesh),
        "other_shape": lambda: ShardedLayer(layer, (hidden,), case.options, plan, mesh)(
            hidden[:2], **case.options
        ),
        "random": lambda: ShardedLayer(Dropping(), (x,), {}, dropping, mesh),
        "random_mask": lambda: ShardedLayer(Masking(), (x,), {}, masking, mesh),
        "two_specs": lambda: shard(tied, None, None, mesh, parameter_specs=two_specs),
        "other_options": lambda: whole(hidden),
        "gradient_elsewhere": lambda: whole(hidden, **asking),
    }
    found: dict[str, list[str | None]] = {}
    for name, run in runs.items():
        try:
            run()
        except UserError as error:
            found[name] = [error.message, error.hint]
        else:
            found[name] = ["no error", None]
    return found


def example() -> str:
    """Run the example of the page; return the block."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})
    return str(block)


def device(rank: int, folder: str, cases: Mapping[str, Case]) -> None:
    """Run all on one logical device."""
    where = f"file://{folder}/rendezvous"
    limit = timedelta(minutes=5)  # after the end of one process, the others end, too
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=4, timeout=limit)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    row = init_device_mesh("cpu", (4,))
    meshes = {"2": square["inner"], "4": row}  # two pairs of processes compute the same
    found: dict[str, Any] = {
        f"{name} {plan}": trained(case, own, meshes[plan[-1]])
        for name, case in cases.items()
        for plan, own in case.plans.items()
    }
    found |= {
        "by_hand": by_hand(square),
        "module": of_a_module(row),
        "tied": tied_together(row),
        "summed_in_order": summed_in_order(row),
        "refused": refused(cases, row),
    }
    found["example"] = example()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)  # a forked process has no threads of its parent
    torch.manual_seed(1)
    cases = {"llama": llama(), "vit": vit()}
    multiprocessing.start_processes(device, (sys.argv[1], cases), nprocs=4, start_method="fork")
