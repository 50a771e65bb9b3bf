"""Plans of operators and functions with specs, on four processes that are started once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import share_compute
from share_compute.sharding.functional import shard
from share_compute.sharding.specs import ShardingRefused

PROGRAM = Path(__file__).with_name("logical_devices.py")
PLANS = ("searched", "drawn0", "drawn1")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sharding")]  # one worker starts the processes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of the four processes found."""
    folder = tmp_path_factory.mktemp("devices")
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["llama", "vit"])
def test_a_plan_trains_as_one_device(
    found: list[dict[str, Any]], model: str, plan: str, devices: int
) -> None:
    for each in found:
        run = each[f"{model} {plan}_{devices}"]
        assert run["loss"] < 1e-5
        assert run["gradient"] < 1e-5
        assert run["input"] < 1e-5
        assert run["relative"] < 1e-4
        assert run["placements"]
        assert run["replicated"] == {}


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("model", ["llama", "vit"])
def test_the_searched_plan_is_that_of_megatron(found: list[dict[str, Any]], model: str, devices: int) -> None:
    run = found[0][f"{model} searched_{devices}"]
    assert {"column", "heads", "row"} <= set(run["strategies"])
    assert {"AllGather", "ReduceScatter"} <= set(run["collectives"])


def test_drawn_plans_use_all_collectives(found: list[dict[str, Any]]) -> None:
    drawn = [run for name, run in found[0].items() if " drawn" in name]
    used = {each for run in drawn for each in run["collectives"]}
    assert used == {"AllGather", "AllReduce", "AllToAll", "ReduceScatter"}


@pytest.mark.exact
def test_shard_gives_the_bits_of_dtensor_by_hand(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["by_hand"] == {"column": True, "row": True, "propagated": True}
        assert each["module"]
        assert each["tied"]
        assert each["summed_in_order"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("indivisible", "argument 0: dimension 0 of size 6 into 4 parts"),
        ("dimensions", "(2,) of argument 0 has 1 numbers, but the tensor has 2 dimensions"),
        ("too_many_parts", "needs 8 devices, and the mesh has 4"),
        ("too_few_specs", "in_specs has 1 specs, and there are 2 arguments"),
        ("outputs", "out_specs has 2 specs, and there are 1 output"),
        ("no_tensor", "argument 1 is not a tensor"),
        ("does_not_fit", "does not fit the mesh (4,)"),
        ("mesh_too_large", "larger than the process group, which has 4"),
        ("mesh_too_small", "smaller than the process group, which has 4"),
        ("mesh_of_nothing", "a mesh cannot have the shape 0"),
        ("no_parameter", "there is no parameter w"),
        ("other_plan", "of other operators than the layer has"),
        ("other_shape", "not [(2, 16, 64)"),
        ("random", "draws random numbers"),
        ("random_mask", "draws random numbers, which would differ"),
        ("two_specs", "0.weight and 1.weight are one parameter, and have different specs"),
        ("other_options", "was planned for the options"),
        ("gradient_elsewhere", "another tensor needs one"),
    ],
)
def test_errors_say_what_is_wrong(found: list[dict[str, Any]], case: str, words: str) -> None:
    message, hint = found[0]["refused"][case]
    assert words in message
    assert hint


def test_the_example_of_the_page_runs(found: list[dict[str, Any]]) -> None:
    assert "share_compute.shard(" in found[0]["example"]


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(ShardingRefused, match="this process has none"):
        shard(abs, None, None, 2)


def test_the_package_imports_the_function_at_its_first_use() -> None:
    code = (
        "import sys, share_compute\n"
        "from share_compute.shards import Shard\n"
        "assert 'torch' not in sys.modules\n"
        "from share_compute import shard\n"
        "assert 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert share_compute.shard is shard
    with pytest.raises(AttributeError, match="has no attribute 'shart'"):
        share_compute.shart  # noqa: B018
