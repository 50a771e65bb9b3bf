import { expect, test } from "vitest";

import type { ClusterEvent, Job, Metric } from "../../api/types";
import { latestProgress, meanSeconds, speedUnit, stallLimitS, timeLeftS, timesOf } from "./eta";

const job = (data: object = {}) => ({ spec: { kind: "train", training: {}, data }, step: 10, total_steps: 40, rows: null }) as unknown as Job;

test("only language models have a speed in tokens", () => {
  expect(speedUnit(job({ dataset: null, table: null }))).toBe("tok/s");
  for (const part of ["dataset", "table", "images", "labels", "pairs"]) {
    expect(speedUnit(job({ [part]: {} }))).toBe("samples/s");
  }
});

test("the time left is that of the steps that are left", () => {
  expect(timeLeftS(job(), 0.5)).toBe(15);
  expect(timeLeftS(job(), null)).toBeNull();
  expect(meanSeconds([])).toBeNull();
  expect(meanSeconds([0.5, 0.5, 0.5])).toBe(0.5);
});

test("one slow step hardly changes it, and a slow first step does not count", () => {
  const even = Array.from({ length: 30 }, () => 1);
  expect(meanSeconds([...even, 60])).toBeCloseTo(1.1);
  expect(meanSeconds([...even, 60, ...even])).toBeCloseTo(1, 1);
  expect(meanSeconds([30, 1, 1, 1, 1, 1])).toBeLessThan(1.2);
});

test("lasting changes of speed are followed", () => {
  const even = Array.from({ length: 50 }, () => 1);
  expect(meanSeconds([...even, ...even.map(() => 4)])).toBeCloseTo(4, 1);
  expect(meanSeconds([...even, ...even.map(() => 0.25)])).toBeCloseTo(0.25, 1);
});

test("a stall is long compared with a step", () => {
  expect([stallLimitS(0.01), stallLimitS(30)]).toEqual([60, 300]);
});

test("progress is a step, another attempt, state or job, and whatever takes the place of steps", () => {
  const running = { ...job(), id: "a", attempt: 1, state: "running" } as Job;
  const event = (kind: string, seq: number) => ({ kind, seq, data: {} }) as unknown as ClusterEvent;
  const first = latestProgress(undefined, running, [], 5);
  expect(first.at).toBe(5);
  expect(latestProgress(first, { ...running }, [event("note", 1)], 9)).toBe(first);
  for (const change of [{ step: 11 }, { attempt: 2 }, { state: "planning" }, { id: "b" }]) {
    expect(latestProgress(first, { ...running, ...change } as Job, [], 9).at).toBe(9);
  }
  for (const kind of ["started", "validated", "checkpoint", "reformed"]) {
    const next = latestProgress(first, running, [event(kind, 1), event("note", 2)], 9);
    expect(next.at).toBe(9);
    expect(latestProgress(next, running, [event(kind, 1), event(kind, 3)], 12).at).toBe(12);
  }
});

test("times are those of steps of training, or of rows", () => {
  const metrics = [
    { split: "train", step: 1, data: { seconds: 2 } },
    { split: "validation", step: 1, data: { loss: 1 } },
  ] as unknown as Metric[];
  const events = [{ kind: "rows", data: { rows_per_s: 4 } }, { kind: "rows", data: {} }] as unknown as ClusterEvent[];
  expect(timesOf(metrics, events)).toEqual([2]);
  expect(timesOf([], events)).toEqual([0.25]);
});
