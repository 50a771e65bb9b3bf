import { expect, test } from "vitest";

import type { Metric } from "../types";
import { mergeLog, mergeMetrics } from "./applyEvents";
import { eventOf } from "./fixture";

const metric = (split: Metric["split"], step: number, loss: number): Metric => ({ split, step, data: { loss } });

test("steps and validations join the metrics in order", () => {
  const merged = mergeMetrics(
    [metric("train", 1, 3)],
    [eventOf("step", { step: 2, loss: 2 }, 2), eventOf("validated", { split: "validation", step: 2, loss: 2.5 }, 3)],
  );
  expect(merged).toEqual([metric("train", 1, 3), metric("train", 2, 2), metric("validation", 2, 2.5)]);
});

test("a step that a resumed attempt repeats replaces the first one", () => {
  const merged = mergeMetrics([metric("train", 1, 3), metric("train", 2, 2)], [eventOf("step", { step: 1, loss: 2.9 }, 9)]);
  expect(merged).toEqual([metric("train", 1, 2.9), metric("train", 2, 2)]);
});

test("metrics that no event concerns stay the same object, so that nothing is drawn again", () => {
  const known = [metric("train", 1, 3)];
  expect(mergeMetrics(known, [eventOf("note", { message: "hello" }, 2)])).toBe(known);
});

test("the log leaves out steps and what it has already", () => {
  const known = [eventOf("note", { message: "old" }, 5)];
  const fresh = eventOf("note", { message: "new" }, 7);
  expect(mergeLog(known, [eventOf("note", { message: "old" }, 5), eventOf("step", {}, 6), fresh])).toEqual([known[0], fresh]);
});
