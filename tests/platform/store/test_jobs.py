"""Jobs, their events, metrics and artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from share_compute.errors import Conflict, NotFound, UserError
from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    CheckpointSaved,
    LayersTimed,
    Measured,
    Note,
    Planned,
    Reformed,
    ReplanAbandoned,
    ReplanProposed,
    StageTiming,
    Started,
    StepCommitted,
    Validated,
)
from share_compute.lifecycle.states import ContributorState, JobState
from share_compute.planning.cost.timings import LayerTiming, MachineTimings
from share_compute.planning.plan import MemberPlan, Plan, StagePlan
from share_compute.specification import TrainJob, parse_job
from share_compute.store import JobRecord, Store
from share_compute.topology import Device


def spec(name: str = "train", steps: int = 4) -> TrainJob:
    layers = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
    return parse_job(
        {
            "name": name,
            "model": {"layers": layers},
            "data": {"dataset": "digits"},
            "training": {"steps": steps},
        }
    )


def step(number: int, loss: float = 1.0) -> StepCommitted:
    return StepCommitted(
        step=number,
        loss=loss,
        learning_rate=1e-3,
        gradient_norm=None,
        samples=16,
        tokens=16,
        seconds=0.5,
        tokens_per_s=32.0,
    )


def planned(*contributor_ids: str) -> Planned:
    members = tuple(
        MemberPlan(contributor_id=one, name=one, microbatches=(0,), memory_bytes=1, reason="")
        for one in contributor_ids
    )
    stage = StagePlan(start=0, stop=1, parameters=1, members=members)
    return Planned(
        plan=Plan(epoch=0, strategy="uniform", num_layers=1, parameters=1, stages=(stage,), microbatches=1)
    )


def contributor(store: Store, name: str) -> str:
    record, _ = store.contributors.join(
        store.invites.create()[1], name=name, host="host", versions={}, limits={"memory_bytes": 1}
    )
    store.contributors.online(record.id, node_id="ab", address="192.0.2.7")
    store.contributors.ready(record.id, capacity=[], links=[])
    return record.id


def running(store: Store, *contributor_ids: str) -> JobRecord:
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, contributor_ids)
    return store.progress.record(job.id, 1, [planned(*contributor_ids)])


def states(store: Store, job_id: str) -> list[str]:
    return [event.data["state"] for event in store.events.after(0, job_id=job_id) if event.kind == "state"]


def test_a_job_keeps_what_was_requested(store: Store) -> None:
    job = store.jobs.create(spec("my job"))
    assert (job.state, job.attempt, job.total_steps, job.name) == ("queued", 1, 4, "my job")
    assert store.jobs.get(job.id).spec == spec("my job")
    with pytest.raises(NotFound):
        store.jobs.get("job-none")


def test_one_idempotency_key_makes_one_job(store: Store) -> None:
    first = store.jobs.create(spec(), idempotency_key="key")
    assert store.jobs.create(spec(), idempotency_key="key") == first
    with pytest.raises(Conflict, match=first.id):
        store.jobs.create(spec("other"), idempotency_key="key")


def test_a_whole_life_is_written_down_in_order(store: Store, clock: Any) -> None:
    worker, spare = contributor(store, "worker"), contributor(store, "spare")
    job = store.jobs.create(spec(steps=2))
    store.jobs.begin(job.id, [worker, spare])
    assert {one.job_id for one in store.contributors.list()} == {job.id}
    events: list[AttemptEvent] = [Note(message="reading"), planned(worker)]
    record = store.progress.record(job.id, 1, events)
    assert (record.state, record.started_at) == ("running", clock.now)
    assert store.contributors.get(spare).job_id is None
    clock.pass_s(9)
    events = [
        step(1, 3.0),
        Validated(split="validation", step=1, loss=3.5, perplexity=33.1),
        step(2, 2.0).model_copy(update={"seconds": 1.5}),
        Validated(split="test", step=2, loss=2.6),
        Validated(split="validation", step=2, loss=2.5),
        CheckpointSaved(step=2, path=Path("/c/2"), size_bytes=7),
        ArtifactSaved(name="model", path=Path("/a"), size_bytes=2**40),
        AttemptEnded(outcome="succeeded", reason="2 steps done"),
    ]
    record = store.progress.record(job.id, 1, events)
    assert (record.state, record.reason, record.step, record.loss) == ("succeeded", "2 steps done", 2, 2.0)
    assert (record.finished_at, record.checkpoint_step) == (clock.now, 2)
    assert record.tokens_per_s == 16.0, "the mean of both steps"
    assert store.contributors.get(worker).job_id is None
    kinds = [event.kind for event in store.events.after(0, job_id=job.id)]
    assert kinds == [
        "state", "state", "note", "planned", "state",
        "step", "validated", "step", "validated", "validated", "checkpoint", "artifact", "ended", "state",
    ]  # fmt: skip
    assert states(store, job.id) == ["queued", "planning", "running", "succeeded"]
    assert [(one.split, one.step, one.data["loss"]) for one in store.progress.metrics(job.id)] == [
        ("train", 1, 3.0),
        ("validation", 1, 3.5),
        ("train", 2, 2.0),
        ("validation", 2, 2.5),
        ("test", 2, 2.6),
    ]
    assert store.progress.artifact(job.id, "model").size_bytes == 2**40


def test_a_resumed_attempt_overwrites_the_steps_it_repeats(store: Store) -> None:
    job = running(store)
    store.progress.record(
        job.id, 1, [step(1), CheckpointSaved(step=1, path=Path("/c"), size_bytes=1), step(2, 9.0)]
    )
    ended = AttemptEnded(outcome="failed", reason="ada was lost", error={"code": "contributor-lost"})
    failed = store.progress.record(job.id, 1, [ended])
    assert (failed.state, failed.error) == ("failed", {"code": "contributor-lost"})
    again = store.jobs.resume(job.id)
    assert (again.attempt, again.step, again.plan, again.error) == (2, 1, None, None)
    assert "continuing from its checkpoint of step 1" in again.reason
    store.jobs.begin(job.id, [])
    store.progress.record(job.id, 2, [planned(), step(2, 5.0)])
    assert [one.data["loss"] for one in store.progress.metrics(job.id)] == [1.0, 5.0]
    with pytest.raises(Conflict, match="attempt 1 is over"):
        store.progress.record(job.id, 1, [step(3)])
    assert store.jobs.get(job.id).step == 2


def proposed(*contributor_ids: str) -> ReplanProposed:
    plan = planned(*contributor_ids).plan
    return ReplanProposed(
        step=30, plan=plan, current_step_s=1.5, gain_s=90.0, move_cost_s=31.0, sentence="move"
    )


def reformed(*contributor_ids: str, expected: tuple[str, ...] = ()) -> Reformed:
    plan = planned(*contributor_ids).plan
    return Reformed(
        epoch=2, step=31, plan=plan, expected=expected, seconds=0.1, recomputed=0, sentence="somebody came"
    )


def test_what_was_measured_and_proposed_is_kept_for_the_attempt(store: Store) -> None:
    worker = contributor(store, "worker")
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [worker])
    measured = Measured(
        step=10,
        predicted_step_s=1.0,
        measured_step_s=1.5,
        stages=(StageTiming(predicted_busy_s=0.9, measured_busy_s=1.4),),
    )
    proposal = proposed(worker)
    record = store.progress.record(job.id, 1, [planned(worker), measured, proposal])
    assert (record.measured, record.proposal) == (measured, proposal)
    assert [event.kind for event in store.events.after(0, job_id=job.id)][-2:] == [
        "measured",
        "replan-proposed",
    ]
    store.jobs.move(job.id, JobState.failed, "lost", attempt=1)
    again = store.jobs.resume(job.id)
    assert (again.measured, again.proposal) == (None, None)


def test_another_epoch_changes_plan_and_leases(store: Store) -> None:
    stays, dies, joins, taken = (contributor(store, name) for name in ("stays", "dies", "joins", "taken"))
    job = running(store, stays, dies)
    other = running(store, taken)
    measured = Measured(step=3, predicted_step_s=None, measured_step_s=1.5, stages=())
    plan = planned(stays, joins, taken).plan
    epoch = Reformed(
        epoch=2,
        step=4,
        plan=plan,
        lost=(dies,),
        joined=(joins, taken),
        seconds=0.8,
        recomputed=3,
        sentence="dies was lost",
    )
    record = store.progress.record(job.id, 1, [measured, epoch])
    assert (record.state, record.plan, record.measured) == ("running", plan, None)
    assert record.reason == "running on 3 machines in 1 stage"
    leases = {one.name: one.job_id for one in store.contributors.list()}
    assert leases == {"stays": job.id, "dies": None, "joins": job.id, "taken": other.id}
    assert store.events.after(0, job_id=job.id)[-1].data["recomputed"] == 3
    store.contributors.leave(joins)
    without = epoch.model_copy(update={"epoch": 3, "plan": planned(stays).plan})
    store.progress.record(job.id, 1, [without])
    assert store.contributors.get(joins).job_id is None


def test_a_proposal_leases_what_is_free_until_it_is_carried_out(store: Store) -> None:
    stays, joins, taken, leaves = (contributor(store, name) for name in ("stays", "joins", "taken", "leaves"))
    job, other = running(store, stays), running(store, taken)
    store.contributors.leave(leaves)

    def tell(event: AttemptEvent) -> dict[str, str | None]:
        record = store.progress.record(job.id, 1, [event])
        assert (record.proposal is None) == (joins not in expected)
        return {one.name: one.job_id for one in store.contributors.list()}

    expected = {joins}
    held = {"stays": job.id, "joins": job.id, "taken": other.id, "leaves": None}
    assert tell(proposed(stays, joins, taken, leaves)) == held
    # The machine is a catch-up replica in an epoch in which it has no stage.
    assert tell(reformed(stays, expected=(joins,))) == held
    expected.clear()
    assert tell(reformed(stays, joins)) == held
    assert tell(reformed(stays)) == held | {"joins": None}


def test_a_proposal_that_is_given_up_frees_its_machines(store: Store) -> None:
    stays, joins, late = (contributor(store, name) for name in ("stays", "joins", "late"))
    job = running(store, stays)
    store.progress.record(job.id, 1, [proposed(stays, joins), proposed(stays, late)])
    # Only the coordinator knows whether members still run on machines of the first proposal.
    assert {one.job_id for one in store.contributors.list()} == {job.id}
    record = store.progress.record(job.id, 1, [ReplanAbandoned(reason="the job cannot have late")])
    assert record.proposal is None
    assert [one.name for one in store.contributors.list() if one.job_id == job.id] == ["stays"]
    assert store.events.after(0, job_id=job.id)[-1].data == {"reason": "the job cannot have late"}


def test_a_plan_takes_no_machine_that_is_gone(store: Store) -> None:
    stays, gone = contributor(store, "stays"), contributor(store, "gone")
    job = running(store, stays)
    store.contributors.set_state(store.contributors.get(gone), ContributorState.lost, "its node died")
    epoch = Reformed(
        epoch=2, step=1, plan=planned(stays, gone).plan, seconds=0, recomputed=0, sentence="gone joined"
    )
    store.progress.record(job.id, 1, [epoch])
    assert store.contributors.get(gone).job_id is None


def test_fruitless_attempts_are_counted_until_somebody_resumes(store: Store) -> None:
    job = running(store)
    error = {"code": "contributor-lost"}
    again = store.jobs.requeue(job.id, "ada was lost", attempt=1, fruitless_attempts=3, error=error)
    assert (again.fruitless_attempts, again.error) == (3, None)
    assert again.reason == (
        "ada was lost; continuing from the start (it has no checkpoint) as soon as enough machines are ready"
    )
    assert store.events.after(0, job_id=job.id)[-1].data["error"] == error
    store.jobs.cancel(job.id)
    assert store.jobs.resume(job.id).fruitless_attempts == 0
    fresh = store.jobs.create(spec())
    store.jobs.begin(fresh.id, [])
    waiting = store.jobs.requeue(fresh.id, "waiting for contributors", attempt=1)
    assert waiting.reason == "waiting for contributors; beginning as soon as enough machines are ready"


def test_members_that_live_on_hold_what_was_committed(store: Store) -> None:
    job = running(store)
    saved = CheckpointSaved(step=3, path=Path("/c/3"), size_bytes=1)
    store.progress.record(job.id, 1, [step(3), saved, step(4)])
    again = store.jobs.requeue(job.id, "the coordinator died", attempt=1, leaves_members=True)
    assert again.step == 4
    assert again.reason == (
        "the coordinator died; continuing from its members' state, else from its checkpoint of step 3, "
        "as soon as enough machines are ready"
    )
    store.jobs.begin(job.id, [])
    # The next attempt died before it had a plan, and the machines with the first attempt's members are unknown.
    again = store.jobs.requeue(job.id, "the coordinator died", attempt=2, leaves_members=True)
    assert (again.step, "its members' state, else from its checkpoint of step 3" in again.reason) == (4, True)
    store.jobs.begin(job.id, [])
    started = Started(first_step=4, total_steps=4)
    assert store.progress.record(job.id, 3, [planned(), started]).step == 3
    fresh = store.jobs.create(spec())
    store.jobs.begin(fresh.id, [])
    waiting = store.jobs.requeue(fresh.id, "the coordinator died", attempt=1, leaves_members=True)
    assert waiting.reason == "the coordinator died; beginning as soon as enough machines are ready"


def timed(machine: str, **layers_s: float) -> LayersTimed:
    timings = {int(layer[1:]): LayerTiming(seconds, 2 * seconds) for layer, seconds in layers_s.items()}
    device = Device("cpu", "some cpu", 2**30, {"float32": 1e10}, 1e10)
    return LayersTimed(
        step=4, machines={machine: MachineTimings(microbatch_size=4, device=device, layers=timings)}
    )


def test_times_of_layers_outlive_the_attempt(store: Store) -> None:
    job = running(store)
    assert store.progress.timings(job.id) == {}
    store.progress.record(job.id, 1, [timed("ada", l0=1.0, l1=2.0), timed("grace", l2=3.0)])
    store.jobs.requeue(job.id, "lost", attempt=1)
    store.jobs.begin(job.id, [])
    store.progress.record(job.id, 2, [timed("ada", l1=5.0)])
    kept = store.progress.timings(job.id)
    assert kept["ada"].layers == {0: LayerTiming(1.0, 2.0), 1: LayerTiming(5.0, 10.0)}
    assert kept["grace"] == timed("grace", l2=3.0).machines["grace"]
    with pytest.raises(NotFound):
        store.progress.timings("job-none")


def test_a_transaction_is_all_or_nothing(store: Store) -> None:
    job = running(store)
    before = store.events.last_seq()
    ended = AttemptEnded(outcome="succeeded", reason="done")
    with pytest.raises(Conflict):
        store.progress.record(job.id, 1, [step(1), ended, ended])
    assert store.events.last_seq() == before
    assert store.jobs.get(job.id).step == 0


def test_cancelling_and_resuming(store: Store) -> None:
    queued = store.jobs.create(spec())
    assert store.jobs.cancel(queued.id).state == "cancelled"
    assert store.jobs.cancel(queued.id) == store.jobs.get(queued.id)
    assert "from the start" in store.jobs.resume(queued.id).reason
    with pytest.raises(Conflict, match="only failed and cancelled"):
        store.jobs.resume(queued.id)
    job = running(store)
    assert store.jobs.cancel(job.id).cancel_requested_at is not None
    store.jobs.cancel(job.id)
    assert [event.kind for event in store.events.after(0, job_id=job.id)].count("cancel-requested") == 1


@pytest.mark.parametrize("is_reported", [True, False], ids=["reported", "noticed"])
def test_a_failure_after_a_wish_to_cancel_is_no_failure(store: Store, *, is_reported: bool) -> None:
    worker = contributor(store, "worker")
    job = running(store, worker)
    store.jobs.cancel(job.id)
    if is_reported:
        ended = AttemptEnded(outcome="failed", reason="ada was lost", error={"code": "contributor-lost"})
        over = store.progress.record(job.id, 1, [ended])
    else:
        over = store.jobs.move(job.id, JobState.failed, "ada was lost", attempt=1, error={"code": "x"})
    assert (over.state, over.error) == (JobState.cancelled, None)
    assert over.reason == "cancelled; its attempt ended on its own: ada was lost"
    assert store.contributors.get(worker).job_id is None
    assert store.jobs.resume(job.id).cancel_requested_at is None


def test_only_a_waiting_job_has_a_reason_to_wait(store: Store) -> None:
    job = store.jobs.create(spec())
    store.jobs.explain(job.id, "waiting for contributors")
    store.jobs.explain(job.id, "waiting for contributors")
    assert states(store, job.id) == ["queued", "queued"]
    store.jobs.cancel(job.id)
    store.jobs.explain(job.id, "waiting for contributors")
    assert store.jobs.get(job.id).reason == "cancelled before it ran"


def test_a_restarted_server_queues_again_what_it_was_at(store: Store) -> None:
    worker = contributor(store, "worker")
    kept, stopped = running(store, worker), running(store)
    saved = CheckpointSaved(step=3, path=Path("/c/3"), size_bytes=1)
    store.progress.record(kept.id, 1, [step(3), saved, step(4)])
    store.jobs.cancel(stopped.id)
    assert [job.id for job in store.jobs.requeue_interrupted("the server was restarted")] == [kept.id]
    again = store.jobs.get(kept.id)
    assert (again.state, again.attempt, again.step) == ("queued", 2, 4)
    assert again.reason == (
        "the server was restarted; continuing from its members' state, else from its checkpoint of step 3, "
        "as soon as enough machines are ready"
    )
    assert store.jobs.get(stopped.id).state == "cancelled"
    assert store.contributors.get(worker).job_id is None


def test_a_lost_contributor_is_no_longer_leased(store: Store) -> None:
    worker = contributor(store, "worker")
    running(store, worker)
    store.contributors.set_state(store.contributors.get(worker), ContributorState.lost, "its node died")
    assert store.contributors.get(worker).job_id is None


def test_pages_hold_every_job_once_newest_first(store: Store, clock: Any) -> None:
    made = []
    for index in range(7):
        made.append(store.jobs.create(spec(f"job {index}")).id)
        clock.pass_s(index % 2)  # some share a moment
    seen: list[str] = []
    cursor = None
    while True:
        page, cursor = store.jobs.page(limit=3, cursor=cursor)
        seen += [job.id for job in page]
        if cursor is None:
            break
    assert sorted(seen) == sorted(made)
    moments = [store.jobs.get(one).created_at for one in seen]
    assert moments == sorted(moments, reverse=True)
    assert [job.name for job in store.jobs.page(name="JOB 3")[0]] == ["job 3"]
    assert store.jobs.page(name="%")[0] == []
    assert store.jobs.page(states=[JobState.running])[0] == []
    with pytest.raises(UserError, match="cursor"):
        store.jobs.page(cursor="nonsense")


def test_events_are_read_on_from_any_point(store: Store) -> None:
    job = running(store)
    store.progress.record(job.id, 1, [step(number) for number in range(1, 6)])
    all_events = store.events.after(0, job_id=job.id)
    assert [event.seq for event in all_events] == sorted({event.seq for event in all_events})
    middle = all_events[3].seq
    assert store.events.after(middle, job_id=job.id) == all_events[4:]
    assert store.events.after(0, job_id=job.id, limit=2) == all_events[:2]
    rest = store.events.after(0, job_id=job.id, without=["step", "planned"])
    assert {event.kind for event in rest} == {"state"}


def test_long_runs_are_sampled_at_the_steps_that_give_a_curve_its_shape(store: Store) -> None:
    job = running(store)
    steps = [step(number, 9.0 if number == 700 else 1 / number) for number in range(1, 1001)]
    validated = [Validated(split="validation", step=number, loss=2.0) for number in range(100, 1001, 100)]
    store.progress.record(job.id, 1, [*steps, *validated])
    metrics = store.progress.metrics(job.id, most=50)
    train = [one.step for one in metrics if one.split == "train"]
    assert train == sorted(set(train))
    assert 40 <= len(train) <= 53
    assert {1, 700, 1000} <= set(train), "the ends and what stands out"
    assert [one.step for one in metrics if one.split == "validation"] == list(range(100, 1001, 100))
    part = store.progress.metrics(job.id, after_step=690, until_step=730, most=50)
    assert [one.step for one in part if one.split == "train"] == list(range(691, 731))


def test_listeners_are_notified_of_commits_and_not_rollbacks(store: Store) -> None:
    notified: list[None] = []
    unsubscribe = store.on_commit(lambda: notified.append(None))
    job = store.jobs.create(spec())
    assert len(notified) == 1
    with pytest.raises(Conflict):
        store.jobs.move(job.id, JobState.succeeded, "no", attempt=1)
    assert len(notified) == 1
    unsubscribe()
    store.jobs.cancel(job.id)
    assert len(notified) == 1


def test_listeners_are_notified_only_of_what_wrote_an_event(store: Store) -> None:
    worker = contributor(store, "worker")
    job = store.jobs.create(spec())
    store.jobs.explain(job.id, "waiting")
    notified: list[None] = []
    store.on_commit(lambda: notified.append(None))
    store.heartbeats.note(worker)
    store.heartbeats.write()
    store.jobs.explain(job.id, "waiting")
    assert notified == []
    store.jobs.begin(job.id, [worker])
    store.progress.record(job.id, 1, [Note(message="reading")])
    assert len(notified) == 2


def test_only_free_contributors_are_leased(store: Store) -> None:
    busy, gone, free = (contributor(store, name) for name in ("busy", "gone", "free"))
    running(store, busy)
    store.contributors.leave(gone)
    job = store.jobs.create(spec())
    for other in (busy, gone):
        with pytest.raises(Conflict, match="only 1 of 2"):
            store.jobs.begin(job.id, [free, other])
    assert store.jobs.get(job.id).state == "queued"
    assert store.contributors.get(free).job_id is None
    assert store.jobs.begin(job.id, [free]).state == "planning"


def test_a_wish_to_cancel_outlives_the_attempt(store: Store) -> None:
    job = running(store)
    store.jobs.cancel(job.id)
    assert store.jobs.requeue(job.id, "waiting for others", attempt=1).state == "cancelled"


def test_an_earlier_attempt_cannot_end_a_later_one(store: Store) -> None:
    job = running(store)
    store.jobs.move(job.id, JobState.failed, "ada was lost", attempt=1)
    store.jobs.resume(job.id)
    store.jobs.begin(job.id, [])
    for late in (
        lambda: store.jobs.move(job.id, JobState.failed, "too late", attempt=1),
        lambda: store.jobs.requeue(job.id, "too late", attempt=1),
    ):
        with pytest.raises(Conflict, match="attempt 1 is over"):
            late()
    assert store.jobs.get(job.id).state == "planning"


def test_what_somebody_works_at_is_not_queued_again(store: Store) -> None:
    kept, lost = running(store), running(store)
    assert [job.id for job in store.jobs.requeue_interrupted("its attempt was lost", but=[kept.id])] == [
        lost.id
    ]
    assert store.jobs.get(kept.id).state == "running"
    assert store.jobs.get(lost.id).reason.startswith("its attempt was lost; continuing from its members")


@pytest.mark.parametrize(
    "database_url", [pytest.param("postgresql", marks=pytest.mark.postgres)], indirect=True
)
def test_text_that_the_database_cannot_hold_is_the_callers_mistake(store: Store) -> None:
    with pytest.raises(UserError, match="cannot be stored"):
        store.invites.create("nul \0")


def test_the_queue_says_since_when_each_job_waits(store: Store, clock: Any) -> None:
    first = store.jobs.create(spec("first"))
    clock.pass_s(1)
    second = store.jobs.create(spec("second"))
    store.jobs.begin(store.jobs.create(spec("runs")).id, [])
    submitted_at = clock()
    store.jobs.begin(first.id, [])
    store.progress.record(first.id, 1, [Started(first_step=1, total_steps=4), step(1)])
    clock.pass_s(60)
    store.jobs.requeue(first.id, "ada was lost", attempt=1, fruitless_attempts=1)
    put_back_at = clock()
    clock.pass_s(60)
    store.jobs.explain(first.id, "waiting for contributors")
    store.jobs.explain(second.id, "waiting for contributors")
    assert [(one.name, one.attempt, one.waiting_since) for one in store.jobs.queue()] == [
        ("first", 2, put_back_at),
        ("second", 1, submitted_at),
    ]
    assert store.jobs.queue()[0].reason == "waiting for contributors"
    assert store.jobs.queue()[0].fruitless_attempts == 1


def test_failures_are_found_by_when_they_happened(store: Store, clock: Any) -> None:
    job = store.jobs.create(spec())
    store.jobs.begin(job.id, [])
    clock.pass_s(3600)
    store.jobs.move(job.id, JobState.failed, "it broke", attempt=1)
    failed_at = clock()
    clock.pass_s(1)
    assert [one.id for one in store.jobs.failed_since(failed_at)] == [job.id]
    assert store.jobs.failed_since(clock()) == []


@pytest.mark.parametrize(
    ("data", "counts_tokens"),
    [
        ({"files": ["a.txt"]}, True),
        ({"files": ["a.csv"], "labels": {"column": "rating"}, "text_column": "text"}, False),
        ({"files": ["a.csv"], "table": {"target": "price"}}, False),
        ({"dataset": "digits"}, False),
    ],
)
def test_only_the_speed_of_language_models_is_counted_in_tokens(
    store: Store, data: dict[str, Any], counts_tokens: bool
) -> None:
    config = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}
    declared = spec().model_dump(mode="json")["model"]
    model = declared if {"table", "dataset"} & set(data) else {"config": config}
    task = {"task": "tabular_regression"} if "table" in data else {}
    job = parse_job({"model": model, "data": data, "training": {"steps": 4, "sequence_length": 16}, **task})
    assert store.jobs.create(job).counts_tokens is counts_tokens
