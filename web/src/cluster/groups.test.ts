import { expect, test } from "vitest";

import { changed, heldBy, merged } from "../api/events/clusterEvents";
import type { MachineSummary, ClusterEvent, ClusterView } from "../api/types";
import { found, groupsOf, reused, sumsOf, worksOf } from "./groups";
import { sorted } from "./sorting";

const machine = (id: string, more: Partial<MachineSummary> = {}): MachineSummary => ({
  id,
  name: id,
  owner: null,
  host: `${id}.example`,
  state: "ready",
  reason: "",
  kind: "cpu",
  device: "Example CPU",
  flops_per_s: 1e9,
  lent_bytes: 100,
  head_latency_s: null,
  head_bytes_per_s: null,
  held: null,
  joined_at: "2026-01-31T12:00:00Z",
  last_seen_at: "2026-01-31T12:00:00Z",
  left_at: null,
  ...more,
});
const cluster = (machines: MachineSummary[], islands: string[][]): ClusterView => ({
  machines,
  islands: {
    islands: islands.map((ids) => ({ id: ids[0]!, machines: ids, latency_s: null, bytes_per_s: null })),
    links: [],
    is_current: true,
    is_assumed: false,
  },
});
const event = (kind: string, id: string, data: Record<string, unknown>): ClusterEvent => ({
  seq: 1,
  kind,
  data,
  job_id: null,
  contributor_id: id,
  attempt: null,
  at: "2026-01-31T12:01:00Z",
});
const working = event("work", "a", { job: "job-1", deployment: null, name: "digits", start: 0, stop: 2, num_layers: 3 });

test("who is not measured arrives, and who is gone is shown only when asked for", () => {
  const view = cluster([machine("a"), machine("b", { kind: null }), machine("c", { state: "lost" })], [["a", "c"]]);
  expect(groupsOf(view, false).map(({ id, machines }) => [id, machines.length])).toEqual([["a", 1], ["arriving", 1]]);
  expect(groupsOf(view, true).at(-1)).toMatchObject({ id: "gone", machines: [{ id: "c" }] });
});

test("work changes one row and leaves the others the same objects", () => {
  const before = cluster([machine("a"), machine("b")], [["a", "b"]]);
  const { cluster: after, unknown } = changed(before, [working]);
  expect(after.machines[0]!.held).toMatchObject({ job_id: "job-1", name: "digits", stop: 2, stage: null });
  expect(after.machines[1]).toBe(before.machines[1]);
  expect(unknown).toEqual([]);
  const free = event("work", "a", { job: null, deployment: null });
  expect(changed(after, [free]).cluster.machines[0]!.held).toBeNull();
});

test("steps of jobs leave the cluster the same object", () => {
  const before = cluster([machine("a")], [["a"]]);
  expect(changed(before, [{ ...event("step", "a", {}), contributor_id: null, job_id: "job-1" }]).cluster).toBe(before);
});

test("who is new is asked for, and so is who became ready", () => {
  const before = cluster([machine("a", { state: "probing", kind: null })], []);
  const ready = event("contributor", "a", { state: "ready", reason: "measured and ready" });
  const { cluster: after, unknown } = changed(before, [ready, event("contributor", "z", { state: "joining", reason: "" })]);
  expect(unknown).toEqual(["a", "z"]);
  expect(after.machines[0]!.state).toBe("ready");
  const fresh = cluster([machine("a"), machine("z")], [["a"]]);
  expect(merged(after, fresh).machines.map(({ id }) => id)).toEqual(["a", "z"]);
});

test("who is lost holds nothing any more", () => {
  const before = changed(cluster([machine("a")], [["a"]]), [working]).cluster;
  const lost = event("contributor", "a", { state: "lost", reason: "its Ray node died" });
  const after = changed(before, [lost]).cluster.machines[0]!;
  expect(after).toMatchObject({ state: "lost", held: null, left_at: "2026-01-31T12:01:00Z" });
});

test("a free machine holds nothing", () => {
  expect(heldBy({ job: null, deployment: null })).toBeNull();
  expect(heldBy({ job: null, deployment: "dep-1", name: "chat" })).toMatchObject({ deployment_id: "dep-1", start: null });
});

test("the search looks at names, owners, devices, states and work", () => {
  const all = [machine("ash", { owner: "Ada" }), machine("birch", { held: heldBy(working.data) })];
  expect(found(all, "ADA").map(({ id }) => id)).toEqual(["ash"]);
  expect(found(all, "example digits").map(({ id }) => id)).toEqual(["birch"]);
  expect(found(all, " ")).toBe(all);
});

test("figures are sums over those that are here", () => {
  const held = { ...heldBy(working.data)!, memory_bytes: 40 };
  expect(sumsOf([machine("a", { held }), machine("b")])).toEqual({
    machines: 2, atWork: 1, flopsPerS: 2e9, lentBytes: 200, usedBytes: 40,
  });
});

test("sorting puts what is not known last, whichever way", () => {
  const all = [machine("a", { flops_per_s: 0 }), machine("b", { flops_per_s: 1 }), machine("c", { flops_per_s: 2 })];
  const ids = (desc: boolean) => sorted(all, "speed", desc, new Map()).map(({ id }) => id);
  expect(ids(false)).toEqual(["b", "c", "a"]);
  expect(ids(true)).toEqual(["c", "b", "a"]);
  expect(sorted(all, "joined", true, new Map()).map(({ id }) => id)).toEqual(["c", "b", "a"]);
});

test("islands in which nothing changed stay the same objects", () => {
  const before = cluster([machine("a"), machine("b")], [["a"], ["b"]]);
  const drawn = groupsOf(before, false);
  const again = reused(drawn, groupsOf(changed(before, [working]).cluster, false));
  expect([again[0] === drawn[0], again[1] === drawn[1]]).toEqual([false, true]);
});

test("work is listed with its machines, the largest first", () => {
  const held = (more: object) => ({ held: { name: "digits", ...more } });
  const machines = [
    machine("a", held({ name: "poet", deployment_id: "dep-1" })),
    machine("b", held({ job_id: "job-1" })),
    machine("c"),
    machine("d", held({ job_id: "job-1" })),
  ];
  expect(worksOf(machines)).toEqual([
    { id: "job-1", name: "digits", isJob: true, machines: ["b", "d"] },
    { id: "dep-1", name: "poet", isJob: false, machines: ["a"] },
  ]);
});
