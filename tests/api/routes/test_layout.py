"""Where the weights of a result or of a checkpoint are: files, layers, stages and machines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.api.conftest import Plane

from share_compute.errors import NotFound, UserError
from share_compute.lifecycle.attempt_events import ArtifactSaved, Planned
from share_compute.models.profiles.places import Places
from share_compute.planning.plan import BranchPlan, MemberPlan, Plan, StagePlan
from share_compute.scopes import Scope
from share_compute_api.client.client import Client
from share_compute_api.schemas.layout import WeightLayout

PLACES = Places(
    stack="model.layers.",
    num_layers=3,
    opening=("model.embed_tokens.",),
    closing=("model.norm.", "lm_head."),
    tied=("model.embed_tokens.weight",),
)
FILES = {
    "model-00001-of-00002.safetensors": ["model.embed_tokens.weight", "model.layers.0.q.weight"],
    "model-00002-of-00002.safetensors": [
        "model.layers.1.q.weight",
        "model.layers.2.q.weight",
        "model.norm.weight",
        "model.layers.3.q.weight",
        "other",
    ],
}


def stage(start: int, stop: int, *machines: str) -> StagePlan:
    members = tuple(
        MemberPlan(contributor_id=f"c-{name}", name=name, microbatches=(0,), memory_bytes=1, reason="")
        for name in machines
    )
    return StagePlan(start=start, stop=stop, parameters=1, members=members)


def plan(stages: tuple[StagePlan, ...], branches: tuple[BranchPlan, ...] = ()) -> Plan:
    return Plan(
        epoch=0,
        strategy="uniform",
        num_layers=3,
        parameters=1,
        places=PLACES,
        stages=stages,
        microbatches=1,
        branches=branches,
    )


PLAN = plan((stage(0, 2, "ada", "bob"), stage(2, 3, "cy")))


def write(folder: Path, files: dict[str, list[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        save_file({name: np.zeros((4, 2), np.float32) for name in names}, folder / file)


@pytest.fixture
def job_id(plane: Plane, client: Client, digits: dict[str, Any]) -> str:
    job_id = client.submit(digits).id
    plane.store.jobs.begin(job_id, [])
    return job_id


def save(plane: Plane, job_id: str, files: dict[str, list[str]], known: Plan | None = PLAN) -> Path:
    folder = plane.settings.data_folder / "jobs" / job_id / "artifacts" / "model"
    write(folder, files)
    saved = ArtifactSaved(name="model", path=folder, size_bytes=1)
    plane.store.progress.record(job_id, 1, [*([] if known is None else [Planned(plan=known)]), saved])
    return folder


def machines(layout: WeightLayout) -> dict[int | None, list[str]]:
    return {
        part.layer: [
            name
            for held in layout.stages_of(part.layer, is_tied=bool(part.tied))
            for name in held.machines.values()
        ]
        for part in layout.layers
    }


def test_each_weight_is_in_its_file_its_layer_and_on_its_machines(
    plane: Plane, client: Client, job_id: str
) -> None:
    save(plane, job_id, FILES)
    layout = client.layout(job_id, "model", pattern="*")
    found = {weight.name: (weight.layer, weight.file) for weight in layout.weights}
    first, second = FILES
    assert found == {
        "model.embed_tokens.weight": (-1, first),
        "model.layers.0.q.weight": (0, first),
        "model.layers.1.q.weight": (1, second),
        "model.layers.2.q.weight": (2, second),
        "model.norm.weight": (3, second),
        "model.layers.3.q.weight": (None, second),
        "other": (None, second),
    }
    weight = layout.weights[0]
    assert (weight.shape, weight.dtype, weight.size_bytes) == ((4, 2), "F32", 32)
    assert [(part.layer, part.weights, part.size_bytes) for part in layout.layers] == [
        (-1, 1, 32), (0, 1, 32), (1, 1, 32), (2, 1, 32), (3, 1, 32), (None, 2, 64),
    ]  # fmt: skip
    # The embedding is tied, so the last stage holds it too.
    pair = ["ada", "bob"]
    assert machines(layout) == {-1: [*pair, "cy"], 0: pair, 1: pair, 2: ["cy"], 3: ["cy"], None: []}


def test_the_answer_lists_as_many_weights_as_wanted(plane: Plane, client: Client, job_id: str) -> None:
    save(plane, job_id, FILES)
    assert client.layout(job_id, "model").weights == ()
    layout = client.layout(job_id, "model", pattern="model.layers.*", limit=2)
    assert [weight.layer for weight in layout.weights] == [0, 1]
    assert layout.matched == 4
    with pytest.raises(UserError, match="limit"):
        client.layout(job_id, "model", pattern="*", limit=10**6)


def test_adapters_have_the_layers_of_the_matrices_that_they_change(
    plane: Plane, client: Client, job_id: str
) -> None:
    names = ["base_model.model.model.layers.2.q.lora_A.weight", "base_model.model.lm_head.weight"]
    save(plane, job_id, {"adapter_model.safetensors": names})
    layout = client.layout(job_id, "model", pattern="*")
    assert [(weight.name, weight.layer) for weight in layout.weights] == [(names[0], 2), (names[1], 3)]


def test_branches_hold_each_layer_several_times(plane: Plane, client: Client, job_id: str) -> None:
    branches = (
        BranchPlan(number=0, stages=PLAN.stages),
        BranchPlan(number=1, stages=(stage(0, 1, "di"), stage(1, 3, "eve"))),
    )
    save(plane, job_id, FILES, plan(PLAN.stages, branches))
    assert machines(client.layout(job_id, "model"))[1] == ["ada", "bob", "eve"]


def test_without_a_plan_no_layer_is_guessed(plane: Plane, client: Client, job_id: str) -> None:
    save(plane, job_id, FILES, None)
    layout = client.layout(job_id, "model")
    assert (layout.num_layers, layout.stages) == (None, ())
    assert [(part.layer, part.weights) for part in layout.layers] == [(None, 7)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        (2**60).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
        (26).to_bytes(8, "little") + b'{"a": {"data_offsets": 1}}',
    ],
)
def test_a_damaged_file_is_an_error(plane: Plane, client: Client, job_id: str, content: bytes) -> None:
    folder = save(plane, job_id, {})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"damaged|headers"):
        client.layout(job_id, "model")


def test_links_are_not_followed_and_only_the_owner_reads(
    plane: Plane, client: Client, job_id: str, tmp_path: Path
) -> None:
    write(tmp_path / "secret", {"model.safetensors": ["secret"]})
    folder = save(plane, job_id, {})
    (folder / "model.safetensors").symlink_to(tmp_path / "secret" / "model.safetensors")
    with pytest.raises(NotFound, match="no weights"):
        client.layout(job_id, "model")
    _, key = plane.store.keys.create("another", [Scope.submit])
    with Client(plane.url, key) as other, pytest.raises(NotFound, match="may read"):
        other.layout(job_id, "model")


def test_the_command_shows_layers_or_weights(
    plane: Plane, job_id: str, run: Callable[..., CompletedProcess[str]]
) -> None:
    write(plane.settings.data_folder / "jobs" / job_id / "checkpoints" / "step-00000004", FILES)
    plane.store.progress.record(job_id, 1, [Planned(plan=PLAN)])
    shown = run("artifacts", "layout", job_id, COLUMNS="80")
    assert shown.returncode == 0, shown.stderr
    assert "checkpoint of step 4" in shown.stdout
    assert "model.embed_tokens.weight is tied" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert {row[1] for row in rows if row[2:3] == ["cy"]} == {"2"}, "stages count from 1"
    save(plane, job_id, FILES)
    found = json.loads(run("artifacts", "layout", job_id, "--match", "*.2.q.*", "--json").stdout)
    (item,) = found["items"]
    assert (item["name"], item["layer"], item["stages"], item["machines"]) == (
        "model.layers.2.q.weight", 2, [1], ["cy"],
    )  # fmt: skip
    assert found["source"] == "model"
