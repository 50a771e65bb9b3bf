"""Members on a machine whose owner limits its rates, on real Ray nodes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import Attempt

from share_compute.lifecycle.attempt_events import AttemptEvent, RoundMerged, TrafficMeasured
from share_compute.models.storage.weights import WeightFolder
from share_compute.rate_limit import BURST_BYTES
from share_compute.topology import Topology

pytestmark = pytest.mark.slow

RATE = 50_000.0
"""Rates of the limited machine, in bytes per second: 0.4 Mbit/s."""


def job(folder: Path) -> dict[str, Any]:
    corpus = folder / "licence.txt"
    corpus.write_text((Path(__file__).parents[4] / "LICENSE").read_text() * 5)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    return {
        "model": {"config": {"model_type": "llama", **sizes, **layers}},
        "data": {"files": [str(corpus)]},
        "tokenizer": {"vocab_size": 300},
        "training": {
            "steps": 9,
            "batch_size": 4,
            "microbatches": 2,
            "sequence_length": 32,
            "synchronization": {"kind": "local", "branches": 2, "every": 3},
        },
        "parallelism": {"stages": 1, "members_per_stage": 1},
    }


def test_a_machine_keeps_its_rates_and_the_job_its_bits(
    attempt: Attempt, topology: Topology, tmp_path: Path
) -> None:
    document = job(tmp_path)
    free = Topology((topology["c0"], topology["c1"]))
    limited = replace(topology["c1"], upload_bytes_per_s=RATE, download_bytes_per_s=RATE)
    digests, seconds, sent_bytes = [], [], []
    for number, machines in enumerate((free, Topology((topology["c0"], limited)))):
        begun_s: list[float] = []

        def listen(event: AttemptEvent, _coordinator: Any, begun_s: list[float] = begun_s) -> None:
            if event.type == "started":
                begun_s.append(time.monotonic())

        folder = tmp_path / str(number)
        events = attempt(document, folder=folder, machines=machines, on_event=listen)
        seconds.append(time.monotonic() - begun_s[0])
        assert events[-1].type == "ended"
        assert events[-1].outcome == "succeeded", events[-1].reason
        digests.append(WeightFolder(folder / "artifacts" / "model").digest())
        merges = [event for event in events if isinstance(event, RoundMerged)]
        assert len(merges) == 3
        sent, received = (
            {
                machine: sum(
                    getattr(event.machines[machine], way) for event in traffic if machine in event.machines
                )
                for machine in ("c0", "c1")
            }
            for traffic in [[event for event in events if isinstance(event, TrafficMeasured)]]
            for way in ("sent_bytes", "received_bytes")
        )
        for branch in range(2):
            contributed = sum(event.branches[branch].sent_bytes for event in merges)
            (machine,) = merges[0].branches[branch].machines
            assert sent[machine] >= contributed
            # The first branch may end the job before the other one reports the last update.
            assert received[machine] >= sum(event.update_bytes for event in merges[:-1])
        sent_bytes.append([max(branch.sent_bytes for branch in event.branches) for event in merges])
    assert digests[0] == digests[1]
    # The last contribution is sent when the earlier ones are paid for at the rate, except the burst.
    assert seconds[1] >= (sum(sent_bytes[1][:-1]) - BURST_BYTES) / RATE, (seconds, sent_bytes)
