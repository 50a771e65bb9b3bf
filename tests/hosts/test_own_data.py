"""Sparse models and tables on several hosts, from uploads: a server that is cut off changes no result."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from sklearn.datasets import load_diabetes
from tests.hosts.cluster import Cluster
from tests.hosts.training import cut, finished
from tests.planted import planted_files

from share_compute.models.storage.weights import WeightFolder
from share_compute.sparse.results import load_rows
from share_compute.store import JobRecord
from share_compute_api.client.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.thorough]
ROWS, FEATURES, PASSES = 2000, 60, 300
STEPS = 1200
CUT_S = 6.0


def result(client: Client, job: JobRecord, folder: Path) -> Path:
    """Download the result of a job."""
    return client.download(job.id, "model", folder / job.id)


def test_a_sparse_model_is_the_same_after_its_server_was_cut_off(cluster: Cluster, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    planted_files(rows, np.random.default_rng(0), ROWS, FEATURES)
    with cluster.server.client() as client:
        upload = client.upload(rows).id
        spec: dict[str, Any] = {
            "kind": "sparse",
            "model": {"name": "logistic", "l2": 1e-3},
            "data": {
                "files": [f"upload:{upload}/train.libsvm"],
                "validation_files": [f"upload:{upload}/validation.libsvm"],
            },
            "training": {"passes": PASSES, "batch_size": 50, "workers": 2, "reproducible": True},
        }
        first = finished(cluster, client, spec)
        second = finished(cluster, client, spec, partial(cut, cluster, "server", CUT_S))
        assert second.step == first.step == second.total_steps
        files = [next(result(client, job, tmp_path).rglob("*.safetensors")) for job in (first, second)]
        (_, wanted), (_, found) = map(load_rows, files)
        np.testing.assert_array_equal(found.places, wanted.places)
        np.testing.assert_array_equal(found.values, wanted.values)
        validated = [one.data for one in client.metrics(second.id) if one.split == "validation"]
        assert validated[-1]["auroc"] > 0.8


def test_a_table_gives_the_same_model_after_its_server_was_cut_off(cluster: Cluster, tmp_path: Path) -> None:
    patients = load_diabetes(scaled=False)
    columns = dict(zip(patients.feature_names, patients.data.T.tolist(), strict=True))
    file = tmp_path / "patients.parquet"
    parquet.write_table(pa.table({**columns, "progression": patients.target}), file)
    with cluster.server.client() as client:
        upload = client.upload(file).id
        spec: dict[str, Any] = {
            "task": "tabular_regression",
            "model": {
                "layers": [
                    {"type": "linear", "options": {"in_features": 10, "out_features": 32}},
                    {"type": "relu"},
                    {"type": "linear", "options": {"in_features": 32, "out_features": 1}},
                ]
            },
            "data": {"files": [f"upload:{upload}/{file.name}"], "table": {"target": "progression"}},
            "training": {"steps": STEPS, "batch_size": 64, "validate_every": 500},
            "parallelism": {"stages": 3},
        }
        first = finished(cluster, client, spec)
        second = finished(cluster, client, spec, partial(cut, cluster, "server", CUT_S))
        folders = [result(client, job, tmp_path) for job in (first, second)]
        assert len({WeightFolder(folder).digest() for folder in folders}) == 1
        assert [one for one in client.metrics(second.id) if one.split == "validation"]
