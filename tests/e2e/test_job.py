"""The pages of jobs in a real browser: curves, placement, one step, samples, checkpoints, batches, events."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.conftest import wait_for
from tests.e2e.accessibility import appearances, checked_pages
from tests.e2e.conftest import Cluster, Complaints
from tests.e2e.scenes import branched, digits, join, measure, merge, push, start, start_branches, train

from share_compute.lifecycle.attempt_events import (
    ArtifactSaved,
    AttemptEnded,
    AttemptEvent,
    LayersTimed,
    LinkBytes,
    Measured,
    Note,
    Reformed,
    RowsDone,
    Sampled,
    StageTiming,
    StepCommitted,
    TrafficMeasured,
    Validated,
)
from share_compute.lifecycle.states import ContributorState
from share_compute.planning.cost.timings import LayerTiming, MachineTimings
from share_compute.planning.plan import Bottleneck, IdleMachine, MemberPlan, Plan, Prediction, StagePlan
from share_compute.specification import parse_any_job
from share_compute.store import ContributorRecord, JobRecord, Store

pytestmark = pytest.mark.browser

PLANNING_S = 180_000
"""The planner starts a process that imports torch, with a low priority."""


def machines(store: Store, *names: str) -> list[ContributorRecord]:
    return [measure(store, join(store, name), 51e9) for name in names]


def laid(epoch: int, *stages: list[ContributorRecord]) -> Plan:
    """A predicted plan of three layers: the members of a stage share its four microbatches."""
    cuts = [0, *range(1, len(stages)), 3]
    return Plan(
        epoch=epoch,
        strategy="auto",
        num_layers=3,
        parameters=2_410,
        microbatches=4,
        stages=tuple(
            StagePlan(
                start=cuts[place],
                stop=cuts[place + 1],
                parameters=2_080,
                members=tuple(
                    MemberPlan(
                        contributor_id=machine.id,
                        name=machine.name,
                        microbatches=tuple(range(4))[seat * 4 // len(stage) : (seat + 1) * 4 // len(stage)],
                        memory_bytes=1 << (20 + place),
                        lent_bytes=4 << 30,
                        busy_fraction=0.62 - 0.2 * place,
                        reason="the fastest machine that is free",
                    )
                    for seat, machine in enumerate(stage)
                ),
            )
            for place, stage in enumerate(stages)
        ),
        idle=(
            IdleMachine(
                contributor_id="c-elm",
                name="elm",
                reason="with it a step would take 13.9 ms instead of 12.4 ms",
            ),
        ),
        prediction=Prediction(
            step_s=0.0124,
            formula_s=0.0121,
            lower_bound_s=0.0118,
            samples_per_s=2580,
            tokens_per_s=2580,
            bottleneck=Bottleneck(
                kind="latency",
                where="ash and birch",
                sentence="a message between ash and birch takes 3.0 ms: without that a step would take 9.4 ms "
                "instead of 12.4 ms",
            ),
            exact=True,
        ),
    )


def tell(store: Store, job: JobRecord, *events: AttemptEvent) -> None:
    store.progress.record(job.id, job.attempt, events)


def running(cluster: Cluster, *names: str) -> tuple[JobRecord, list[ContributorRecord]]:
    """A job that runs on these machines, with a stage on each, and has done ten steps."""
    found = machines(cluster.store, *names)
    job = cluster.store.jobs.create(digits())
    start(cluster.store, job, found)
    plan = laid(1, *([machine] for machine in found))
    tell(
        cluster.store,
        job,
        Reformed(epoch=1, step=1, plan=plan, seconds=0, recomputed=0, sentence="members connected again"),
    )
    train(cluster.store, job, 1, 10)
    return job, found


def rounds(cluster: Cluster) -> tuple[JobRecord, list[ContributorRecord]]:
    """A job of three branches that has merged two rounds; a branch was missing in the second."""
    found = machines(cluster.store, "oak", "pine", "rowan", "yew")
    job = cluster.store.jobs.create(branched())
    start_branches(cluster.store, job, [found[:2], [found[2]], [found[3]]])
    train(cluster.store, job, 1, 10)
    merge(cluster.store, job, 1)
    merge(cluster.store, job, 2, missing=(2,))
    return job, found


def test_curves_are_zoomed_by_dragging_and_by_keys(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash", "birch")
    page.goto(f"{cluster.url}/jobs/{job.id}")
    curve = page.get_by_role("img", name=re.compile("Loss over steps"))
    over = curve.locator(".u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=4)
    page.mouse.up()
    expect(page).to_have_url(re.compile(r"steps=3-8"))
    expect(curve).to_have_accessible_name(re.compile("Steps 3 to 8"))
    page.get_by_label("to step").fill("6")
    page.get_by_label("to step").press("Enter")
    expect(page).to_have_url(re.compile(r"steps=3-6"))
    page.reload()
    expect(curve).to_have_accessible_name(re.compile("Steps 3 to 6"))
    page.get_by_role("button", name="All steps").click()
    expect(page).not_to_have_url(re.compile("steps="))
    expect(curve).to_have_accessible_name(
        re.compile(r"Training 2\.300 at step 1, 0\.2300 at step 10, validation")
    )


def test_curves_show_other_figures_smooth_and_logarithmic(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash")
    page.goto(f"{cluster.url}/jobs/{job.id}")
    page.get_by_label("Log scale").check()
    expect(page).to_have_url(re.compile("scale=log"))
    page.get_by_label("Smoothing").fill("0.9")
    expect(page.get_by_text("training, as measured")).to_be_visible()
    page.get_by_label("Figure").select_option("Step time")
    expect(page.get_by_role("img", name="Step time over steps.")).to_be_visible()
    expect(page).to_have_url(re.compile("curve=seconds"))


def test_curves_of_jobs_lie_side_by_side(page: Page, cluster: Cluster) -> None:
    store = cluster.store
    job, _ = running(cluster, "ash")
    other = store.jobs.create(digits())
    start(store, other, machines(store, "birch"))
    train(store, other, 1, 5)
    page.goto(f"{cluster.url}/jobs/{job.id}")
    page.get_by_label("Compare with").select_option(other.id)
    expect(page).to_have_url(re.compile(f"with={other.id}"))
    legend = page.get_by_role("img", name=re.compile(f"Beside it: digits {other.id[-4:]}"))
    expect(legend).to_contain_text(f"digits {other.id[-4:]}, training")
    page.get_by_role("button", name=re.compile("Without digits")).click()
    expect(page).not_to_have_url(re.compile("with="))


def test_a_long_run_is_shown_by_few_steps_and_closer_where_it_is_zoomed(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash")
    steps = [
        StepCommitted(
            step=step,
            loss=9.0 if step == 4321 else 2 / step,
            learning_rate=0.001,
            gradient_norm=None,
            samples=32,
            tokens=32,
            seconds=0.01,
            tokens_per_s=3200.0,
        )
        for step in range(11, 6001)
    ]
    tell(cluster.store, job, *steps)
    with page.expect_response(re.compile(r"metrics\?most")) as answer:
        page.goto(f"{cluster.url}/jobs/{job.id}")
    shown = [row["step"] for row in answer.value.json()["metrics"] if row["split"] == "train"]
    assert len(shown) < 2100
    assert 4321 in shown
    with page.expect_response(re.compile("until_step")) as closer:
        page.goto(f"{cluster.url}/jobs/{job.id}?steps=4300-4400")
    assert len(closer.value.json()["metrics"]) == 101


def test_the_placement_shows_its_figures_and_marks_lost_machines(page: Page, cluster: Cluster) -> None:
    job, (ash, birch) = running(cluster, "ash", "birch")
    (cedar,) = machines(cluster.store, "cedar")
    page.goto(f"{cluster.url}/jobs/{job.id}")
    placement = page.get_by_role("figure", name=re.compile("Placement of 3 layers"))
    placement.get_by_role("listbox").focus()
    page.keyboard.press("ArrowRight")
    expect(placement.get_by_role("option", selected=True)).to_have_accessible_name(
        re.compile("birch: stage 2")
    )
    expect(placement).to_contain_text("microbatches 0\N{EN DASH}3 (4 of 4)")
    expect(placement).to_contain_text("computes 42% of a step")
    width = placement.get_by_role("option", name=re.compile("^ash")).evaluate("one => one.style.width")
    placement.get_by_text("memory", exact=True).click()
    expect(placement.get_by_role("option", name=re.compile("^ash"))).not_to_have_css("width", width)

    # The machine is marked before the job has another plan, by the event itself: the page gets no other response.
    held: list[Route] = []
    is_holding = True

    def answer(request: Route) -> None:
        if is_holding:
            held.append(request)
        else:
            request.continue_()

    page.route(lambda url: "/api/v1/events" not in url, answer)
    cluster.store.contributors.set_state(
        cluster.store.contributors.get(birch.id),
        ContributorState.lost,
        "its Ray node is dead or does not answer",
    )
    expect(placement).to_contain_text("birch \N{MIDDLE DOT} lost")
    expect(placement.get_by_role("option", name="birch: lost")).to_be_visible()
    figures = page.get_by_role("region", name="Progress")
    expect(figures).to_contain_text("without birch")
    is_holding = False
    for request in held:
        request.continue_()
    plan = laid(2, [ash], [cedar])
    lost = Reformed(
        epoch=2,
        step=11,
        plan=plan,
        lost=(birch.id,),
        joined=(cedar.id,),
        seconds=0.8,
        recomputed=1,
        sentence="birch was lost, cedar joined",
    )
    tell(cluster.store, job, lost)
    expect(placement.get_by_role("option", name=re.compile("^cedar"))).to_be_visible()
    expect(placement).to_contain_text("birch was lost, cedar joined; no step for 800.0 ms")
    expect(placement).not_to_contain_text("birch \N{MIDDLE DOT} lost")
    expect(figures).not_to_contain_text("without birch")


def test_machines_show_how_busy_they_are_and_what_they_send(page: Page, cluster: Cluster) -> None:
    job, (ash, birch) = running(cluster, "ash", "birch")
    page.goto(f"{cluster.url}/jobs/{job.id}")
    block = page.get_by_role("option", name=re.compile("^ash"))
    expect(block.locator("[aria-hidden]")).to_have_text("ash")
    stages = tuple(StageTiming(predicted_busy_s=0.007, measured_busy_s=0.008) for _ in range(2))
    measured = Measured(
        step=10,
        predicted_step_s=0.0124,
        measured_step_s=0.02,
        stages=stages,
        machines={ash.id: 0.005, birch.id: 0.01},
    )
    sent = LinkBytes(sent_bytes=4_000_000, received_bytes=1_000_000)
    tell(cluster.store, job, measured, TrafficMeasured(step=10, machines={ash.id: sent}))
    expect(block).to_contain_text("25%")
    expect(block).to_have_accessible_name(
        re.compile(r"^ash: measured: computes 25% of a step, sends .*B/s, receives .*B/s, stage 1")
    )
    expect(page.get_by_role("option", name=re.compile("^birch"))).to_contain_text("50%")


def test_what_was_predicted_stands_beside_what_was_measured(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash", "birch")
    page.goto(f"{cluster.url}/jobs/{job.id}")
    expect(page.get_by_role("region", name="Placement")).to_contain_text(
        "A message between ash and birch takes 3.0 ms"
    )
    page.get_by_role("tab", name="One step").click()
    expect(page).to_have_url(re.compile("part=step"))
    page.get_by_role("tab", name="Plan").click()
    expect(page).to_have_url(re.compile("part=plan"))
    page.reload()
    plan = page.get_by_role("tabpanel", name="Plan")
    expect(plan).to_contain_text("12.4 ms")
    expect(plan).to_contain_text("with it a step would take 13.9 ms instead of 12.4 ms")
    stages = tuple(StageTiming(predicted_busy_s=0.007, measured_busy_s=busy) for busy in (0.008, 0.0065))
    tell(
        cluster.store, job, Measured(step=10, predicted_step_s=0.0124, measured_step_s=0.0155, stages=stages)
    )
    expect(plan).to_contain_text("15.5 ms")
    expect(plan).to_contain_text("+25%")
    plan.get_by_text("Computing time of each machine in a step").click()
    expect(plan.get_by_role("row", name=re.compile("birch")).first).to_contain_text("6.5 ms")


def test_one_step_is_laid_out_cell_by_cell(page: Page, cluster: Cluster) -> None:
    job, (ash, birch) = running(cluster, "ash", "birch")
    page.goto(f"{cluster.url}/jobs/{job.id}?part=step")
    section = page.get_by_role("tabpanel", name="One step")
    picture = section.get_by_role("img", name=re.compile("4 microbatches over 2 machines"))
    expect(picture).to_be_visible(timeout=PLANNING_S)
    expect(picture.locator("rect[data-kind=F]")).to_have_count(8)
    expect(picture.locator("rect[data-kind=B]")).to_have_count(8)
    expect(section).to_contain_text("Predicted:")
    # The step is played while the job runs: a line moves over it, and the placement shows the phase of each stage.
    head = picture.locator("[class*='_playhead_']")
    expect(head).to_have_css("display", "inline")
    expect(section).to_contain_text(re.compile(r"The predicted step of .*, slowed down .* times\."))
    section.get_by_role("button", name="Pause the step").click()
    expect(section.get_by_role("button", name="Play the step")).to_be_visible()
    expect(section.get_by_role("list")).to_contain_text(re.compile("forward|backward|update|waiting"))
    page.emulate_media(reduced_motion="reduce")
    expect(section.get_by_role("button", name="Play the step")).to_have_count(0)
    expect(section).to_contain_text(re.compile(r"machines wait \d+% of it"))
    # The mouse cannot be used: compared with the latency of these links, a cell is thinner than a pixel.
    picture.locator("rect[data-kind=B]").first.dispatch_event("pointermove")
    expect(section).to_contain_text(re.compile("ash: B0, "))
    section.get_by_text("The same as a table").click()
    expect(section.get_by_role("row", name=re.compile("birch · stage 2"))).to_be_visible()
    # Measured times replace the predicted ones in the layout.
    second = LayerTiming(1.0, 1.0)
    timed = {
        machine.id: MachineTimings(microbatch_size=8, device=device, layers=dict.fromkeys(range(3), second))
        for machine in (ash, birch)
        for device in machine.capacity or ()
    }
    tell(cluster.store, job, LayersTimed(step=4, machines=timed))
    expect(section).to_contain_text(re.compile(r"Predicted: \d\d\.\d\d s"), timeout=PLANNING_S)


def test_rounds_are_drawn_and_each_branch_has_its_placement(page: Page, cluster: Cluster) -> None:
    job, _ = rounds(cluster)
    page.goto(f"{cluster.url}/jobs/{job.id}")
    section = page.get_by_role("tabpanel", name="Rounds")
    expect(section).to_contain_text("2 rounds")
    merge(cluster.store, job, 3, late=(2,))
    facts = r"3 rounds . each branch sent 2\.6 KiB and received 7\.3 KiB . .* times less"
    expect(section).to_contain_text(re.compile(facts))
    expect(page.get_by_text("Loss and gradient norm are those of branch 0")).to_be_visible()
    picture = section.get_by_role("img", name="Rounds 1 to 3: computing and waiting of 3 branches")
    expect(picture.locator("rect[data-of=missing]")).to_have_count(1)
    expect(picture.locator("rect[data-of=late]")).to_have_count(1)
    expect(picture.locator("rect[data-of=computing]")).to_have_count(8)
    picture.locator("rect[data-of=late]").dispatch_event("pointermove", {"bubbles": True})
    expect(section).to_contain_text("branch 2, round 3: late, from round 2, computing 800.0 ms")
    section.get_by_text("The same as a table").click()
    expect(section.get_by_role("row", name=re.compile("2 . step 20 2 . missing"))).to_be_visible()

    placement = page.get_by_role("figure", name=re.compile("Placement of 3 layers, branch 0"))
    expect(placement.get_by_role("option", name=re.compile("^oak"))).to_be_visible()
    page.get_by_label("Branch", exact=True).select_option("2")
    placement = page.get_by_role("figure", name=re.compile("Placement of 3 layers, branch 2"))
    expect(placement.get_by_role("option", name=re.compile("^yew"))).to_be_visible()
    expect(placement).not_to_contain_text("gone")
    expect(page.get_by_role("log")).to_contain_text(
        "branch 0 on oak and pine; branch 1 on rowan; branch 2 on yew"
    )


def test_pushes_to_a_parameter_server_are_merges_of_their_own(page: Page, cluster: Cluster) -> None:
    found = machines(cluster.store, "oak", "pine", "rowan")
    job = cluster.store.jobs.create(branched("kind: parameter_server, staleness: 1"))
    start_branches(cluster.store, job, [[machine] for machine in found])
    for number, (branch, base) in enumerate(((0, 0), (1, 0), (2, 0), (0, 1)), 1):
        push(cluster.store, job, number, branch, base)
    page.goto(f"{cluster.url}/jobs/{job.id}")
    section = page.get_by_role("tabpanel", name="Rounds")
    expect(section).to_contain_text("4 pushes")
    picture = section.get_by_role("img", name="Merges 1 to 4: computing of 3 branches")
    expect(picture.locator("rect[data-of=computing]")).to_have_count(4)
    expect(picture.locator("rect[data-of=late], rect[data-of=missing]")).to_have_count(0)
    section.get_by_text("The same as a table").click()
    expect(
        section.get_by_role("row", name=re.compile("3 . step 30 2 . weights 2 merges old"))
    ).to_be_visible()
    expect(section.get_by_role("columnheader", name="Merge")).to_be_visible()


def test_samples_come_while_it_trains(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash")
    page.goto(f"{cluster.url}/jobs/{job.id}")
    expect(page.get_by_role("tab", name="Plan")).to_be_visible()
    expect(page.get_by_role("tab", name="Samples")).to_have_count(0)
    samples = [Sampled(step=step, prompt="The sea", text=f" is wide {step}") for step in range(10, 70, 10)]
    tell(cluster.store, job, *samples)
    page.get_by_role("tab", name="Samples").click()
    section = page.get_by_role("tabpanel", name="Samples")
    expect(section.get_by_role("listitem").first).to_contain_text("step 60")
    expect(section.get_by_role("listitem").first).to_contain_text("The sea is wide 60")
    expect(section.get_by_role("listitem")).to_have_count(4)
    section.get_by_role("button", name="Show all 6 samples").click()
    expect(section.get_by_role("listitem")).to_have_count(6)


def test_checkpoints_are_listed_and_one_is_exported(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash")
    folder = cluster.folder / "jobs" / job.id
    for step in (5, 10):
        checkpoint = folder / "checkpoints" / f"step-{step:08}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights.safetensors").write_bytes(bytes(2048))
    page.goto(f"{cluster.url}/jobs/{job.id}?part=results")
    section = page.get_by_role("region", name="Checkpoints")
    expect(section.get_by_role("listitem").first).to_contain_text(
        "step 10 \N{MIDDLE DOT} the job continues from here"
    )
    made = folder / "exports" / "step-00000005" / "model"

    def export(route: Route) -> None:
        """Replaces the exporting process, which would find no weights in these checkpoints."""
        made.mkdir(parents=True)
        (made / "config.json").write_text("{}")
        saved = ArtifactSaved(name="step-00000005", path=made, size_bytes=2)
        record = cluster.store.progress.add_artifact(job.id, saved)
        route.fulfill(status=201, content_type="application/json", body=record.model_dump_json())

    page.route("**/checkpoints/5/export", export)
    section.get_by_role("button", name="Export the checkpoint of step 5").click()
    expect(section.get_by_text("exported as step-00000005")).to_be_visible()
    expect(page.get_by_role("button", name="Download config.json")).to_be_visible()


def test_the_log_is_filtered_and_ten_thousand_events_stay_fast(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash")
    notes = [Note(message=f"note {number}", level="info") for number in range(10_000)]
    tell(cluster.store, job, *notes)
    page.goto(f"{cluster.url}/jobs/{job.id}")
    log = page.get_by_role("log")
    expect(log).to_contain_text("note 9999")
    expect(log.get_by_role("definition")).to_have_count(200)
    is_at_end = "one => one.scrollTop + one.clientHeight >= one.scrollHeight - 2"
    wait_for(lambda: log.evaluate(is_at_end), "the end of the log in view")
    log.scroll_into_view_if_needed()
    tell(cluster.store, job, Note(message="The newest"))
    expect(log.get_by_text("the newest")).to_be_in_viewport()
    log.evaluate("one => { one.scrollTop = 0; }")
    expect(page.get_by_label("Follow the end")).not_to_be_checked()
    log.get_by_role("button", name="Show 1,000 older events").click()
    expect(log.get_by_role("definition")).to_have_count(1200)
    page.get_by_label("Show", exact=True).select_option("Checkpoints and artifacts")
    expect(log.get_by_role("definition")).to_have_count(1)
    expect(log).to_contain_text("Checkpoint at step 10")
    expect(page).to_have_url(re.compile("events=results"))


def test_a_job_is_cloned_by_the_form(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash")
    page.goto(f"{cluster.url}/jobs/{job.id}")
    clone = page.get_by_role("link", name="Clone")
    expect(clone).to_have_attribute("href", f"/submit?from={job.id}")


def test_a_failed_job_names_fields_and_machines_and_is_submitted_again(page: Page, cluster: Cluster) -> None:
    job, (_, birch) = running(cluster, "ash", "birch")
    cluster.store.contributors.set_state(
        cluster.store.contributors.get(birch.id),
        ContributorState.lost,
        "its Ray node is dead or does not answer",
    )
    fields = [{"field": "training.batch_size", "problem": "needs 9 GiB of memory"}]
    error = {
        "hint": "lend more memory there, use more stages, or smaller microbatches",
        "machine": "birch",
        "details": {"fields": fields},
    }
    tell(cluster.store, job, AttemptEnded(outcome="failed", reason="birch ran out of memory", error=error))
    page.goto(f"{cluster.url}/jobs/{job.id}")
    failure = page.get_by_role("alert")
    expect(failure).to_contain_text("birch ran out of memory.")
    expect(failure).to_contain_text("training.batch_size: needs 9 GiB of memory")
    expect(failure).to_contain_text(
        "Machine: birch \N{MIDDLE DOT} lost: its Ray node is dead or does not answer"
    )
    expect(failure).to_contain_text("Lend more memory there, use more stages, or smaller microbatches.")
    failure.get_by_role("link", name="Fix and resubmit").click()
    page.get_by_role("heading", name="Submit a job", level=1).wait_for()
    expect(page).to_have_url(re.compile(f"from={job.id}"))


def test_a_job_that_stalls_says_so(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash")
    page.clock.install()
    page.goto(f"{cluster.url}/jobs/{job.id}")
    figures = page.get_by_role("region", name="Progress")
    expect(figures).to_contain_text("Time left0.30 s")
    page.clock.fast_forward(70_000)
    expect(figures).to_contain_text("No progress for")
    train(cluster.store, job, 11, 11)
    expect(figures).to_contain_text("Time left0.29 s")


def test_the_page_of_a_running_job_is_short(page: Page, cluster: Cluster) -> None:
    job, _ = running(cluster, "ash", "birch", "cedar")
    tell(cluster.store, job, *(Note(message=f"note {number}", level="info") for number in range(100)))
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{cluster.url}/jobs/{job.id}")
    curve = page.get_by_role("img", name=re.compile("Loss over steps"))
    placement = page.get_by_role("figure", name=re.compile("Placement of 3 layers"))
    expect(curve).to_be_in_viewport(ratio=1)
    expect(placement).to_be_in_viewport(ratio=1)
    expect(page.get_by_label("Loading")).to_have_count(0, timeout=PLANNING_S)
    assert page.evaluate("document.documentElement.scrollHeight") <= 1500


def batch(cluster: Cluster) -> JobRecord:
    spec = {
        "kind": "generate",
        "name": "answers",
        "deployment": "tiny",
        "data": {"files": ["/srv/questions.jsonl"], "prompt": "question"},
    }
    job = cluster.store.jobs.create(parse_any_job(spec))
    cluster.store.jobs.begin(job.id, [])
    tell(cluster.store, job, RowsDone(done=30, total=120, failed=2, rows_per_s=4.5, tokens_per_s=90.0))
    return job


def test_a_batch_has_a_page_of_its_own(page: Page, cluster: Cluster) -> None:
    job = batch(cluster)
    page.goto(f"{cluster.url}/jobs/{job.id}")
    expect(page.get_by_text("Rows: 30 of 120 · 2 with an error")).to_be_visible()
    expect(page.get_by_text("20 s", exact=True)).to_be_visible()
    expect(page.get_by_text("The column question of each row is answered by tiny.")).to_be_visible()
    expect(page.get_by_text("/srv/questions.jsonl")).to_be_visible()
    expect(page.get_by_role("heading", name="Curves")).to_have_count(0)
    tell(cluster.store, job, RowsDone(done=60, total=120, failed=2, rows_per_s=4.5, tokens_per_s=90.0))
    expect(page.get_by_text("Rows: 60 of 120 · 2 with an error")).to_be_visible()


def test_jobs_are_filtered_by_state_kind_and_name(page: Page, cluster: Cluster) -> None:
    running(cluster, "ash")
    batch(cluster)
    page.goto(f"{cluster.url}/jobs")
    rows = page.get_by_role("row")
    expect(rows).to_have_count(3)
    page.get_by_label("Kind of job").select_option("answers of a model")
    expect(rows).to_have_count(2)
    expect(page.get_by_role("link", name="answers")).to_be_visible()
    page.get_by_label("Kind of job").select_option("all kinds")
    page.get_by_label("Search by name").fill("DIG")
    expect(page).to_have_url(re.compile("name=DIG"))
    expect(page.get_by_role("link", name="digits")).to_be_visible()
    expect(rows).to_have_count(2)
    page.get_by_role("link", name="failed").click()
    expect(page.get_by_role("heading", name="No job matches.")).to_be_visible()


@appearances("desk")
def test_the_page_of_a_job_is_accessible_and_fits(
    cluster: Cluster, browser: Browser, tmp_path: Path, scheme: Any, width: int, complaints: Complaints
) -> None:
    job, (ash, birch, cedar) = running(cluster, "ash", "birch", "cedar")
    crowd = machines(cluster.store, *(f"machine-{number:02}" for number in range(12)))
    plan = laid(2, [ash, *crowd], [birch], [cedar])
    tell(
        cluster.store,
        job,
        Reformed(epoch=2, step=11, plan=plan, seconds=0.8, recomputed=0, sentence="twelve joined"),
        Sampled(step=10, prompt="The sea", text=" is wide"),
        Validated(split="validation", step=10, loss=0.25, accuracy=0.9),
        Measured(
            step=10,
            predicted_step_s=0.0124,
            measured_step_s=0.0155,
            stages=tuple(StageTiming(predicted_busy_s=0.007, measured_busy_s=0.008) for _ in range(3)),
        ),
    )
    rows = batch(cluster)
    apart, _ = rounds(cluster)
    merge(cluster.store, apart, 3, late=(2,))
    with checked_pages(browser, tmp_path, complaints, scheme=scheme, width=width) as seen:
        page = seen.page
        page.goto(f"{cluster.url}/#key={cluster.key}")
        page.get_by_role("heading", name="Machines", level=1).wait_for()
        shown = (
            f"{job.id}?smooth=0.5&part=step",
            f"{job.id}?part=plan",
            f"{job.id}?part=samples",
            apart.id,
            rows.id,
        )
        for path in shown:
            page.goto(f"{cluster.url}/jobs/{path}")
            page.get_by_role("heading", level=1).wait_for()
            expect(page.get_by_label("Loading")).to_have_count(0, timeout=PLANNING_S)
            if "?" in path:
                for summary in page.locator("summary").all():
                    summary.click()
                if "smooth" in path:
                    expect(page.get_by_role("tabpanel").locator("svg")).to_be_visible(timeout=PLANNING_S)
                page.get_by_role("listbox").focus()
            elif apart.id in path:
                page.get_by_text("The same as a table, with losses and bytes").click()
            seen.check(path)
