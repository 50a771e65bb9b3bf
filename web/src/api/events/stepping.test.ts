import { expect, test } from "vitest";

import { afterEvent, stillStepping, type Until } from "./stepping";

const event = (kind: string, job_id: string | null, data: Record<string, unknown> = {}) => ({ kind, job_id, data });
const none: Until = new Map();

test("a job steps until its last step is long ago, compared with the time of a step", () => {
  const quick = afterEvent(none, event("step", "a", { seconds: 0.1 }), 0);
  const both = afterEvent(quick, event("step", "b", { seconds: 60 }), 0);
  expect(stillStepping(both, 10_000)).toBe(both);
  expect([...stillStepping(both, 10_001).keys()]).toEqual(["b"]);
  expect([...stillStepping(both, 120_001).keys()]).toEqual([]);
});

test("a job that plans or ends does not step, and other events change nothing", () => {
  const stepping = afterEvent(none, event("step", "a", { seconds: 1 }), 0);
  expect(afterEvent(stepping, event("state", "a", { state: "planning" }), 1).size).toBe(0);
  expect(afterEvent(stepping, event("state", "a", { state: "running" }), 1)).toBe(stepping);
  expect(afterEvent(stepping, event("state", "b", { state: "failed" }), 1)).toBe(stepping);
  expect(afterEvent(stepping, event("contributor", null), 1)).toBe(stepping);
});
