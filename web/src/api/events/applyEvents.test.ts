import { expect, test } from "vitest";

import type { Metric, ClusterEvent } from "../types";
import { mergeLog, mergeMetrics } from "./applyEvents";

const event = (seq: number, kind: string, data: Record<string, unknown>): ClusterEvent => ({
  seq,
  kind,
  data,
  job_id: "job-1",
  contributor_id: null,
  attempt: 1,
  at: "2026-01-31T12:00:00Z",
});
const metric = (split: Metric["split"], step: number, loss: number): Metric => ({ split, step, data: { loss } });

test("steps and validations join the metrics in order", () => {
  const merged = mergeMetrics(
    [metric("train", 1, 3)],
    [event(2, "step", { step: 2, loss: 2 }), event(3, "validated", { split: "validation", step: 2, loss: 2.5 })],
  );
  expect(merged).toEqual([metric("train", 1, 3), metric("train", 2, 2), metric("validation", 2, 2.5)]);
});

test("a step that a resumed attempt repeats replaces the first one", () => {
  const merged = mergeMetrics([metric("train", 1, 3), metric("train", 2, 2)], [event(9, "step", { step: 1, loss: 2.9 })]);
  expect(merged).toEqual([metric("train", 1, 2.9), metric("train", 2, 2)]);
});

test("metrics that no event concerns stay the same object, so that nothing is drawn again", () => {
  const known = [metric("train", 1, 3)];
  expect(mergeMetrics(known, [event(2, "note", { message: "hello" })])).toBe(known);
});

test("the log leaves out steps and what it has already", () => {
  const known = [event(5, "note", { message: "old" })];
  const fresh = event(7, "note", { message: "new" });
  expect(mergeLog(known, [event(5, "note", { message: "old" }), event(6, "step", {}), fresh])).toEqual([known[0], fresh]);
});
