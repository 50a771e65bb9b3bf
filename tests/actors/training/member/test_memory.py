"""A member reads only its own tensors: no machine needs memory for the whole model."""

import threading
from pathlib import Path

import pytest
import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from share_compute.lifecycle.attempt_events import Assignment
from share_compute.models.factory import dissect
from share_compute.planning.planner import solve
from share_compute.specification import parse_job
from share_compute.topology import Topology

pytestmark = pytest.mark.slow

PROCESS_BYTES = 600 * 2**20


SIZES = {
    "deep": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 512},
    "one-large-tensor": {
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": 250_000,
    },
}


@pytest.mark.parametrize("shape", [pytest.param("deep", marks=pytest.mark.thorough), "one-large-tensor"])
def test_peak_memory_of_a_member_is_its_shard_and_the_process(
    topology: Topology, tmp_path: Path, shape: str
) -> None:
    from share_compute_actors.group.answering import ask_shard_store
    from share_compute_actors.testing.mailbox import Mailbox
    from share_compute_actors.training.member.schemas import STATUS
    from share_compute_actors.training.membership.training_group import TrainingGroup
    from share_compute_actors.training.shard_store import (
        FACTS,
        SAVED,
        STATE_OF_TRAINING,
        ShardStore,
    )
    from share_compute_actors.wire import FLAG, NOTHING

    config = AutoConfig.for_model("llama", **SIZES[shape], num_attention_heads=16)
    folder = tmp_path / "pretrained"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 500)
    spec = parse_job(
        {
            "model": {"path": str(folder)},
            "data": {"files": [str(text)]},
            "tokenizer": {"vocab_size": 300},
            "training": {"sequence_length": 8, "optimizer": {"name": "sgd"}},
            "parallelism": {"stages": 4},
        }
    )
    assignment = Assignment(job_id="job-memory", attempt=1, spec=spec, topology=topology, folder=tmp_path)
    shard_store = ShardStore.remote(assignment.model_dump_json())
    facts = ask_shard_store(FACTS, shard_store.prepare.remote())
    profile = dissect(facts.blueprint)
    solution = solve(spec, topology, profile, 0, {})
    mailbox = Mailbox.remote()
    runs = max(solution.plan.shares, key=len)
    ask_shard_store(NOTHING, shard_store.cut.remote(list(runs)))
    settled = spec.with_microbatches(solution.plan.microbatches)
    assignment = assignment.model_copy(update={"spec": settled})
    group = TrainingGroup(
        assignment, facts, shard_store, mailbox, threading.Event(), runs, profile.tied_name, print
    )
    try:
        group.load(solution.plan)
        holders = [stage.members[0].contributor_id for stage in solution.plan.stages]
        group.gather(
            FLAG,
            {
                worker: group.handle(worker).snapshot.remote(place, "artifact", copies=False)
                for place, worker in enumerate(holders)
            },
        )
        members = [group.handle(worker) for worker in holders]
        state = STATE_OF_TRAINING.pack(facts.state)
        saving = shard_store.save.remote("artifacts/model", "artifact", state, holders, *members)
        assert ask_shard_store(SAVED, saving).size_bytes
        for worker, status in group.ask(STATUS, holders, "status").items():
            # A member that trains holds its weights, and gradients of the same size.
            shard = 2 * 4 * profile.parameters_of(solution.plan.shard(holders.index(worker)))
            assert status.peak_resident_bytes <= shard + PROCESS_BYTES, f"{status}"
    finally:
        group.dismiss()
        ray.kill(mailbox)
        ray.kill(shard_store)
