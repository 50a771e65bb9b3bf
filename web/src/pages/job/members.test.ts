import { expect, test } from "vitest";

import type { ClusterEvent, ClusterView, Job } from "../../api/types";
import { departuresOf, lostDuring, membersOf } from "./members";

const machine = (id: string, state: string, job_id: string | null = null) => ({ id, name: id, state, reason: "", held: job_id === null ? null : { job_id } });
const cluster = (...machines: ReturnType<typeof machine>[]) => ({ machines }) as unknown as ClusterView;
const plan = (...ids: string[]) => ({ branches: [], stages: [{ members: ids.map((contributor_id) => ({ contributor_id })) }] });
const job = (planned: object | null) => ({ id: "job", plan: planned }) as unknown as Job;
const reformed = (data: object) => ({ kind: "reformed", data }) as unknown as ClusterEvent;

test("members are the machines of the plan, or those that the job holds", () => {
  const view = cluster(machine("ash", "ready", "job"), machine("birch", "lost"), machine("cedar", "ready", "other"));
  expect(membersOf(job(plan("ash", "birch")), view).map(({ id }) => id)).toEqual(["ash", "birch"]);
  expect(membersOf(job(null), view).map(({ id }) => id)).toEqual(["ash"]);
});

test("a member is lost as soon as the cluster says so, before there is a new plan", () => {
  const members = membersOf(job(plan("ash", "birch", "cedar")), cluster(machine("ash", "ready"), machine("birch", "lost"), machine("cedar", "left")));
  expect([...departuresOf(members, [])]).toEqual([["birch", "lost"], ["cedar", "left"]]);
});

test("machines of earlier plans went as the events say, unless they are back", () => {
  const members = membersOf(job(plan("ash")), cluster(machine("ash", "ready")));
  const events = [reformed({ lost: ["ash", "birch"] }), reformed({ left: ["cedar"], joined: ["ash"] })];
  expect([...departuresOf(members, events)]).toEqual([["birch", "lost"], ["cedar", "left"]]);
});

test("a failed job lost the machines that its log says, and none after its end", () => {
  const at = (time: string, kind: string, data: object) => ({ kind, data, at: time }) as unknown as ClusterEvent;
  const named = (id: string) => ({ contributor_id: id, name: `machine ${id}` });
  const planned = { branches: [], stages: [{ members: ["ash", "birch", "cedar"].map(named) }] };
  const events = [
    at("2026-01-01T00:00:00Z", "planned", { plan: planned }),
    at("2026-01-01T00:01:00Z", "reformed", { plan: planned, lost: ["ash", "birch"] }),
    at("2026-01-01T00:02:00Z", "reformed", { plan: planned, joined: ["ash"] }),
    at("2026-01-01T00:09:00Z", "reformed", { plan: planned, lost: ["cedar"] }),
  ];
  expect(lostDuring({ finished_at: "2026-01-01T00:05:00Z" }, events)).toEqual([{ id: "birch", name: "machine birch" }]);
});
