import { expect, test } from "vitest";

import type { Metric } from "../../../api/types";
import { jobSearch, jobsSearch, stepsOf } from "../search";
import { nameOfFigure, nameOfResult } from "../figures";
import { curvesOf, figuresIn, formatOf, smoothed, together } from "./curves";

const train = (step: number, loss: number, more = {}): Metric => ({ split: "train", step, data: { loss, ...more } });
const validation = (step: number, loss: number): Metric => ({ split: "validation", step, data: { loss } });

test("training and validation share their steps", () => {
  const { steps, curves } = curvesOf([{ name: null, metrics: [train(1, 3), train(2, 2), validation(2, 2.5)] }], "loss");
  expect(steps).toEqual([1, 2]);
  expect(curves.map(({ label, values, ink }) => [label, values, ink])).toEqual([
    ["training", [3, 2], 0],
    ["validation", [null, 2.5], 1],
  ]);
});

test("jobs side by side have one ink each", () => {
  const runs = [
    { name: "a", metrics: [train(1, 3), validation(1, 4)] },
    { name: "b", metrics: [train(2, 2)] },
  ];
  const { steps, curves } = curvesOf(runs, "loss");
  expect(steps).toEqual([1, 2]);
  expect(curves.map(({ label, values, ink }) => [label, values, ink])).toEqual([
    ["a, training", [3, null], 0],
    ["a, validation", [4, null], 0],
    ["b, training", [null, 2], 1],
  ]);
});

test("a smoothed curve stands before the one that was measured", () => {
  const { curves } = curvesOf([{ name: null, metrics: [train(1, 4), train(2, 1)] }], "loss", 0.5);
  expect(curves.map(({ label, isFaint }) => [label, isFaint ?? false])).toEqual([
    ["training, as measured", true],
    ["training", false],
  ]);
  expect(curves[1]!.values).toEqual([4, 2]);
  expect(smoothed([1, null, 1], 0.9)).toEqual([1, null, 1]);
});

test("only what was measured can be looked at", () => {
  expect(figuresIn([train(1, 3, { gradient_norm: null, seconds: 0.1 })])).toEqual(["loss", "seconds"]);
});

test("a stretch of steps fills the gaps of all steps", () => {
  expect(together([train(1, 3), train(9, 1)], [train(9, 1), train(5, 2)]).map((metric) => metric.step)).toEqual([1, 5, 9]);
});

test("addresses keep what is known, and nothing else", () => {
  expect(jobSearch({ steps: "20-10", smooth: "0.9", curve: "nonsense", scale: "log", with: "job-1,job-2" })).toEqual({
    smooth: 0.9,
    scale: "log",
    with: "job-1,job-2",
  });
  expect(jobSearch({ curve: "loss" })).toEqual({});
  expect(stepsOf("10-20")).toEqual([10, 20]);
  expect(jobsSearch({ state: "running", kind: "serve", name: 7 })).toEqual({ state: "running", name: "7" });
  expect([jobsSearch({ trials: true }), jobsSearch({ trials: "no" })]).toEqual([{ trials: true }, {}]);
});

test("a task among several has figures of its own", () => {
  const metrics = [
    { step: 1, split: "train", data: { loss: 2, tasks: { "digit.loss": 3 } } },
    { step: 2, split: "validation", data: { loss: 1, tasks: { "digit.loss": 1.5, "digit.accuracy": 0.75 } } },
  ] as unknown as Metric[];
  expect(figuresIn(metrics)).toEqual(["loss", "digit.loss", "digit.accuracy"]);
  expect(curvesOf([{ name: null, metrics }], "digit.loss").curves.map(({ values }) => values)).toEqual([
    [3, null],
    [null, 1.5],
  ]);
  expect(curvesOf([{ name: null, metrics }], "digit.accuracy").curves.map(({ values }) => values)).toEqual([[0.75]]);
  expect(formatOf("digit.accuracy")(0.75)).toBe("75.0%");
  expect(formatOf("text.perplexity")(12.34)).toBe("12.3");
  expect(nameOfFigure("digit.accuracy")).toBe("digit: Accuracy");
  expect(["loss", "validation_loss", "test_top_5_accuracy", "test_digit.accuracy", "duality_gap"].map(nameOfResult)).toEqual([
    "Loss",
    "Loss (validation)",
    "Top-5 accuracy (test)",
    "digit: Accuracy (test)",
    "duality gap",
  ]);
  expect(jobSearch({ curve: "digit.accuracy" }).curve).toBe("digit.accuracy");
  for (const curve of ["digit.seconds", "Digit.loss", "x.y.loss", "constructor", "loss"]) expect(jobSearch({ curve }).curve).toBeUndefined();
});
