"""Deployments in the store: names, states, and their events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from share_compute.errors import Conflict, NotFound
from share_compute.lifecycle.computation import Computation
from share_compute.lifecycle.deployment_states import DeploymentState
from share_compute.lifecycle.deployment_status import Interruption
from share_compute.planning.plan import Plan
from share_compute.specification import ServeJob, parse_deployment
from share_compute.store import Store

PLAN = Plan(epoch=0, strategy="serving", num_layers=1, parameters=1, stages=(), microbatches=1)


def spec(name: str = "llama") -> ServeJob:
    return parse_deployment({"name": name, "model": {"path": "/srv/llama"}})


def test_a_deployments_life_is_written_down(store: Store, clock: Any) -> None:
    rung: list[bool] = []
    store.on_commit(lambda: rung.append(True))
    made = store.deployments.create(spec(), reason="submitted")
    assert (made.state, made.reason, made.spec, made.plans) == ("pending", "submitted", spec(), ())
    states = DeploymentState
    store.deployments.set_state(made.id, states.loading, "two machines", plans=[PLAN])
    clock.pass_s(5)
    ready = store.deployments.set_state(made.id, states.ready, "it answers")
    assert ready.plans == (PLAN,)
    assert ready.ready_at == clock.now
    store.deployments.set_state(made.id, states.degraded, "ada died")
    clock.pass_s(5)
    again = store.deployments.set_state(made.id, states.ready, "it answers again")
    assert again.ready_at == ready.ready_at
    assert store.deployments.set_state(made.id, states.ready, "it answers again", plans=[PLAN]) == again
    stopped = store.deployments.stop("llama")
    assert (stopped.state, stopped.ended_at, stopped.plans) == ("stopped", clock.now, (PLAN,))
    assert store.deployments.stop(made.id) == stopped
    changes = [(event.data["from"], event.data["state"]) for event in store.events.after(0)]
    assert {event.kind for event in store.events.after(0)} == {"deployment"}
    assert changes == [
        (None, "pending"), ("pending", "loading"), ("loading", "ready"), ("ready", "degraded"),
        ("degraded", "ready"), ("ready", "stopped"),
    ]  # fmt: skip
    assert len(rung) == len(changes)


def test_what_a_replica_loses_is_reported_and_that_it_continues(store: Store) -> None:
    other = store.deployments.create(spec("other"), reason="submitted")
    made = store.deployments.create(spec(), reason="submitted")
    lost = Interruption(number=3, reason="lost birch", machines=("birch",), ago_s=0.4)
    store.deployments.interrupted(made.id, 1, lost)
    store.deployments.went_on(made.id, 1, lost.model_copy(update={"ago_s": 1.5, "seconds": 1.2}))
    first, began, ended = store.events.after(0, deployment_id=made.id)
    assert (first.data["state"], first.data["from"]) == ("pending", None)
    assert began.data["interrupted"] == {
        "replica": 1, "of": 1, "number": 3, "reason": "lost birch", "machines": ["birch"], "ago_s": 0.4
    }  # fmt: skip
    assert ended.data["went_on"] == {"replica": 1, "number": 3, "ago_s": 1.5, "seconds": 1.2}
    assert {began.data["state"], began.data["from"]} == {"pending"}
    assert store.events.after(began.seq, deployment_id=made.id) == [ended]
    assert len(store.events.after(0, deployment_id=other.id)) == 1
    with pytest.raises(NotFound):
        store.deployments.interrupted("dep-none", 0, lost)


def test_the_first_choice_of_compiled_code_stays(store: Store) -> None:
    made = store.deployments.create(spec(), reason="submitted")
    assert made.computation is None
    first = Computation(is_compiled=True, gain=1.25, sentence="compiled: 1.25 times as fast as eager")
    for proposed in (first, Computation(is_compiled=False, sentence="eager: no compiler")):
        assert store.deployments.choose_computation(made.id, proposed).computation == first
    assert store.deployments.get(made.id).computation == first
    (_, event) = store.events.after(0, deployment_id=made.id)
    assert event.data["computation"] == first.model_dump()


def test_a_failure_is_kept_with_its_cause(store: Store) -> None:
    made = store.deployments.create(spec(), reason="submitted")
    error = {"code": "plan-infeasible", "hint": "lend more memory"}
    failed = store.deployments.set_state(made.id, DeploymentState.failed, "it does not fit", error=error)
    assert (failed.error, failed.reason) == (error, "it does not fit")
    assert store.deployments.get(made.id) == failed
    assert store.events.after(0)[-1].data["error"] == error


def test_a_name_is_free_again_when_its_deployment_is_over(store: Store) -> None:
    first = store.deployments.create(spec(), reason="submitted")
    with pytest.raises(Conflict, match=f"llama is up already .{first.id}, pending") as caught:
        store.deployments.create(spec(), reason="submitted")
    assert "undeploy llama" in (caught.value.hint or "")
    store.deployments.stop("llama")
    assert store.deployments.by_name("llama") is None
    assert store.deployments.get("llama") == store.deployments.get(first.id)
    second = store.deployments.create(spec(), reason="submitted")
    assert store.deployments.get("llama") == store.deployments.by_name("llama") == second
    assert store.deployments.get(first.id).state == "stopped"
    for missing in (store.deployments.get, store.deployments.stop):
        with pytest.raises(NotFound, match="no deployment zebra"):
            missing("zebra")


def test_of_many_with_one_name_one_gets_it(open_store: Callable[[], Store]) -> None:
    stores = [open_store() for _ in range(3)]
    gate = threading.Barrier(len(stores))
    results: list[str] = []

    def race(store: Store) -> None:
        gate.wait()
        try:
            results.append(store.deployments.create(spec(), reason="submitted").id)
        except Conflict:
            results.append("taken")

    threads = [threading.Thread(target=race, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results).count("taken") == 2


def test_what_is_over_does_not_come_back(store: Store) -> None:
    made = store.deployments.create(spec(), reason="submitted")
    with pytest.raises(Conflict, match="llama is pending; it cannot become ready"):
        store.deployments.set_state(made.id, DeploymentState.ready, "at once")
    store.deployments.stop(made.id)
    for state in DeploymentState:
        with pytest.raises(Conflict, match="llama is stopped"):
            store.deployments.set_state(made.id, state, "late")
    assert store.deployments.get(made.id).reason == "taken down"


def test_deployments_are_listed_in_pages(store: Store, clock: Any) -> None:
    made = []
    for index in range(5):
        made.append(store.deployments.create(spec(f"model-{index}"), reason="submitted").id)
        clock.pass_s(1)
    store.deployments.stop(made[1])
    page, cursor = store.deployments.page(limit=3)
    rest, end = store.deployments.page(limit=3, cursor=cursor)
    assert [one.id for one in page + rest] == [made[4], made[3], made[2], made[0]]
    assert end is None
    over, _ = store.deployments.page(states=[DeploymentState.stopped])
    assert [one.id for one in over] == [made[1]]
    assert [one.id for one in store.deployments.list()] == [made[0], *made[2:]]
