"""A filled database of each earlier revision is migrated, and all its content is read through the store."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Connection, DateTime, MetaData, create_engine, insert, select
from sqlalchemy.dialects.postgresql import JSONB

from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.states import JobState
from share_compute.planning.plan import Plan
from share_compute.store import Store
from share_compute.store.database.backups import prepare
from share_compute.store.database.database import migration_config, newest_revision
from share_compute.store.secret import digest
from share_compute.topology import Device, Link

REVISIONS = sorted(
    script.revision for script in ScriptDirectory.from_config(migration_config()).walk_revisions()
)
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
KEY, CODE, AGENT_KEY = "sck_one", "sci_one", "scm_one"
MEMBER = {"contributor_id": "c-1", "name": "ada", "microbatches": [0, 1], "memory_bytes": 1, "reason": ""}
STAGE = {"start": 0, "stop": 1, "parameters": 1, "members": [MEMBER]}
PLAN_0001 = {
    "epoch": 0,
    "strategy": "uniform",
    "num_layers": 1,
    "parameters": 1,
    "idle": ["spare"],
}
SPARE = {"contributor_id": "c-2", "name": "spare", "reason": "it was not needed"}
PLAN = {**PLAN_0001, "microbatches": 2, "idle": [SPARE]}
SPEC = {
    "kind": "train",
    "name": "kept",
    "model": {"layers": [{"type": "relu", "options": {}}]},
    "data": {"dataset": "digits"},
}
TIMING = {"predicted_busy_s": 0.5, "measured_busy_s": 0.75}
MEASURED = {"type": "measured", "step": 10, "predicted_step_s": 1.0, "measured_step_s": 1.5, "machines": {}}
PROPOSED = {
    "type": "replan-proposed", "step": 10, "current_step_s": 1.5, "gain_s": 9.0, "move_cost_s": 1.0,
    "sentence": "it is faster",
}  # fmt: skip
HELD = {
    "job": "job-1", "deployment": None, "name": "kept", "start": 0, "stop": 1, "num_layers": 1, "microbatches": 2,
    "of_microbatches": 2, "memory_bytes": 1,
}  # fmt: skip
STATES = {"state": "failed", "from": "running", "reason": "it failed"}
VERSIONS = {"share_compute": "0.1.0", "python": "3.11.9", "ray": "2.60.0", "torch": "2.12.0", "protocol": "1"}


def rows(revision: str) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table at a revision; columns that did not exist yet are removed later."""
    stages, members = ("pools", "members_per_pool") if revision < "0017" else ("stages", "members_per_stage")
    plan = {**(PLAN_0001 if revision == "0001" else PLAN), stages: [STAGE]}
    layout = {"strategy": "uniform", stages: 1, "buddies" if revision < "0017" else "backups": False}
    buckets = {"mode": "size", "bucket_bytes": 8, "cuts": None}
    fusion = (
        {"gradient_fusion": buckets}
        if revision < "0026"
        else {"communication_fusion": {"allreduce": buckets}}
    )
    measured = {**MEASURED, stages: [TIMING]}
    proposed = {**PROPOSED, "plan": plan}
    held = {**HELD, "pool" if revision < "0017" else "stage": 0}
    error = {"code": "contributor-lost", "mend" if revision < "0016" else "hint": "resume it"}
    lost = {**error, "code": "library-lost" if revision < "0017" else "shard-store-lost"}
    device = Device("cpu", "cpu", memory_bytes=2**31, flops_per_s={"float32": 1e10})
    link = Link("c-1", "head", latency_s=0.001, bytes_per_s=1e8)
    job = {
        "id": "job-1", "name": "kept", "kind": "train", "state": "failed", "reason": "it failed",
        "spec": {**SPEC, "parallelism": {**layout, members: 1}, "training": fusion}, "plan": plan, "measured": measured,
        "proposal": proposed, "error": error, "attempt": 2, "step": 20, "total_steps": 100,
        "loss": 0.5, "tokens_per_s": 12.5, "created_at": NOON, "started_at": NOON, "finished_at": NOON,
        "checkpoint_path": "/data/jobs/job-1/checkpoints/step-00000020", "checkpoint_step": 20,
        "idempotency_key": "once", "fruitless_attempts": 3,
    }  # fmt: skip
    waits = {
        **job, "id": "job-2", "state": "queued", "reason": "submitted", "plan": None, "measured": None,
        "proposal": None, "error": None, "checkpoint_path": None, "checkpoint_step": None,
        "idempotency_key": None, "finished_at": None,
    }  # fmt: skip
    machine = {
        "id": "c-1", "name": "ada", "key_hash": digest(AGENT_KEY), "state": "ready", "reason": "measured",
        "host": "ada.example", "node_id": "n" * 56, "address": "10.0.0.1", "job_id": None, "deployment_id": None,
        "versions": VERSIONS, "limits": {"memory_bytes": 2**31, "cpu_threads": 2},
        "capacity": [_plain(device)], "links": [_plain(link)],
        "joined_at": NOON, "last_seen_at": NOON, "invite_id": "inv-1",
    }  # fmt: skip
    event = {"at": NOON, "job_id": None, "contributor_id": None, "attempt": None}
    deployment = {
        "id": "dep-1", "name": "served", "state": "ready", "reason": "1 replica answers",
        "spec": {"kind": "serve", "name": "served", "model": {"job": "job-1", "artifact": "model"},
                 "parallelism": {stages: 1}},
        "plans": [plan], "created_at": NOON, "ready_at": NOON,
    }  # fmt: skip
    return {
        "api_keys": [{"id": "key-1", "name": "operator", "key_hash": digest(KEY), "created_at": NOON}],
        "jobs": [job, waits],
        "contributors": [machine],
        "invites": [
            {
                "id": "inv-1", "code_hash": digest(CODE), "label": "for ada", "created_at": NOON,
                "expires_at": NOON, "used_at": NOON, "used_by": "c-1",
            }
        ],
        "events": [
            {**event, "kind": "state", "job_id": "job-1", "attempt": 1, "data": {**STATES, "error": error}},
            {**event, "kind": "planned", "job_id": "job-1", "attempt": 2, "data": {"plan": plan}},
            {**event, "kind": "work", "contributor_id": "c-1", "data": held},
            {**event, "kind": "measured", "job_id": "job-1", "attempt": 2, "data": measured},
            {**event, "kind": "replan-proposed", "job_id": "job-1", "attempt": 2, "data": proposed},
            {**event, "kind": "ended", "job_id": "job-1", "attempt": 2, "data": {"error": lost}},
            {**event, "kind": "contributor", "contributor_id": "c-1", "data": {"state": "ready"}},
        ],
        "metrics": [
            {"job_id": "job-1", "split": "train", "step": 20, "data": {"loss": 0.5, "tokens": 10}},
        ],
        "artifacts": [
            {
                "id": "art-1", "job_id": "job-1", "name": "model", "path": "/data/jobs/job-1/artifacts/model",
                "size_bytes": 2**33, "created_at": NOON,
            }
        ],
        "deployments": [deployment],
    }  # fmt: skip


def _plain(value: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(type(value)).dump_python(value, mode="json")


def fill(connection: Connection, revision: str) -> None:
    """Insert into all tables that exist at a revision, in an order that their keys allow."""
    metadata = MetaData()
    metadata.reflect(connection)
    filled = rows(revision)
    for table in metadata.sorted_tables:
        for row in filled.pop(table.name, []):
            known = {name: value for name, value in row.items() if name in table.columns}
            for name, value in known.items():
                kind = table.columns[name].type
                if isinstance(kind, DateTime) and value is not None and connection.dialect.name == "sqlite":
                    known[name] = value.replace(tzinfo=None)
                assert isinstance(value, dict | list) <= isinstance(kind, JSON | JSONB), (table.name, name)
            connection.execute(insert(table).values(known))
    assert revision < "0005" or not filled, "a table is not filled"


@pytest.mark.parametrize("revision", REVISIONS)
def test_all_that_an_earlier_database_held_is_read(database_url: str, tmp_path: Path, revision: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), revision)
        fill(connection, revision)
    engine.dispose()
    prepare(database_url, tmp_path / "backups", NOON)
    made = list((tmp_path / "backups").glob("*.db"))
    assert len(made) == (database_url.startswith("sqlite") and revision != REVISIONS[-1])
    with closing(Store(database_url, clock=lambda: NOON)) as store:
        store.hold()
        assert_read(store, revision)
        assert_goes_on(store)


def test_the_newest_revision_is_known_without_alembic() -> None:
    assert newest_revision() == REVISIONS[-1]


def assert_read(store: Store, revision: str) -> None:
    key = store.keys.verify(KEY)
    assert key is not None
    assert key.name == "operator"
    (invite,) = store.invites.list()
    assert (invite.label, invite.uses, invite.used_by) == ("for ada", 1, ("c-1",))
    machine = store.contributors.authorize("c-1", AGENT_KEY)
    assert machine.machine().memory_bytes == 2**31
    assert machine.links is not None
    assert machine.links[0].latency_s == 0.001
    assert machine.joined_at == NOON
    job = store.jobs.get("job-1")
    assert (job.state, job.step, job.loss, job.checkpoint_step) == (JobState.failed, 20, 0.5, 20)
    assert job.spec.kind == "train"
    assert job.error == {"code": "contributor-lost", "hint": "resume it"}
    assert job.fruitless_attempts == (0 if revision < "0004" else 3)
    assert job.plan is not None
    assert job.plan.microbatches == 2
    assert [stage.stop for stage in job.plan.stages] == [1]
    assert (job.spec.parallelism.stages, job.spec.parallelism.members_per_stage) == (1, 1)
    assert (job.measured is None) == (job.proposal is None) == (revision < "0002")
    if job.measured is not None and job.proposal is not None:
        assert job.measured.stages[0].measured_busy_s == 0.75
        assert job.proposal.plan == job.plan
    assert [idle.name for idle in job.plan.idle] == ["spare"]
    assert [one.id for one in store.jobs.queued()] == ["job-2"]
    assert store.jobs.queue()[0].id == "job-2"
    events = store.events.after(0)
    assert [event.kind for event in events] == [
        "state",
        "planned",
        "work",
        "measured",
        "replan-proposed",
        "ended",
        "contributor",
    ]
    assert events[0].data["error"] == job.error
    assert Plan.model_validate(events[1].data["plan"]) == job.plan
    (metric,) = store.progress.metrics("job-1")
    assert metric.data["loss"] == 0.5
    assert store.progress.last_step("job-1") == 20
    assert store.progress.timings("job-1") == {}
    assert store.progress.artifact("job-1", "model").size_bytes == 2**33
    (period,) = store.work.of("c-1").periods
    assert (period.job_id, period.stop) == ("job-1", 1)
    (busy,) = store.work.busy("c-1", since=NOON)
    assert busy.busy_fraction == 0.5
    assert store.cluster.summaries()[0].id == "c-1"
    deployments = store.deployments.list()
    assert [one.name for one in deployments] == ([] if revision < "0005" else ["served"])
    for one in deployments:
        assert one.spec.parallelism.stages == 1
        assert [len(plan.stages) for plan in one.plans] == [1]


def assert_goes_on(store: Store) -> None:
    assert store.jobs.resume("job-1").attempt == 3
    assert store.jobs.begin("job-1", ["c-1"]).state is JobState.planning
    assert store.events.last_seq() > 3
    for deployment in store.deployments.list():
        store.deployments.set_state(deployment.id, DeploymentState.stopped, "down")
    assert store.deletions.job("job-2", Path("/data"), cancel=True)


def test_names_of_stages_can_be_changed_back(database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), "0016")
        fill(connection, "0016")
        before = _documents(connection)
        command.upgrade(migration_config(connection), "0017")
        assert not any(word in repr(_documents(connection)) for word in ("pool", "budd", "library-lost"))
        command.downgrade(migration_config(connection), "0016")
        assert _documents(connection) == before
    engine.dispose()


def test_fusion_of_gradients_can_be_changed_back(database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        command.upgrade(migration_config(connection), "0025")
        fill(connection, "0025")
        before = _documents(connection)
        assert "gradient_fusion" in repr(before)
        command.upgrade(migration_config(connection), "0026")
        assert "gradient_fusion" not in repr(_documents(connection))
        command.downgrade(migration_config(connection), "0025")
        assert _documents(connection) == before
    engine.dispose()


def _documents(connection: Connection) -> list[Any]:
    """Return the JSON columns that may hold stages, row by row in the order of the tables' keys."""
    columns = {
        "jobs": ("spec", "plan", "measured", "proposal"),
        "deployments": ("spec", "plans"),
        "events": ("data",),
    }
    metadata = MetaData()
    metadata.reflect(connection, only=list(columns))
    tables = [metadata.tables[name] for name in columns]
    return [
        [
            tuple(row)
            for row in connection.execute(
                select(*(table.c[name] for name in columns[table.name])).order_by(*table.primary_key)
            )
        ]
        for table in tables
    ]
