import { expect, test } from "vitest";

import type { Job, SweepTrials } from "../../../api/types";
import { axesOf, axisOf, drawnAsLogarithms, shortNames } from "./parallel";

const rate = "training.optimizer.learning_rate";
const trial = (number: number, settings: Record<string, unknown>, value: number | null) =>
  ({ number, settings, value }) as SweepTrials["trials"][number];

test("wide ranges of positive numbers are logarithmic, others linear", () => {
  const wide = axisOf(rate, [0.0001, 0.01, 1]);
  expect(wide.at(0.01)).toBeCloseTo(0.5);
  expect(wide.ticks.map((tick) => tick.text)).toEqual(["0.0001", "1"]);
  expect(axisOf("seed", [0, 5, 10]).at(5)).toBe(0.5);
  expect(axisOf("seed", [3, 3]).ticks).toEqual([{ at: 0.5, text: "3" }]);
});

test("a field whose logarithm is drawn has a logarithmic axis, however narrow its range is", () => {
  const fields = { [rate]: { log_uniform: [0.001, 0.01] }, seed: { values: [1, 2] } };
  expect(drawnAsLogarithms({ kind: "sweep", fields } as unknown as Job["spec"])).toEqual([rate]);
  expect(drawnAsLogarithms({ kind: "train" } as Job["spec"])).toEqual([]);
  const trials = [trial(1, { [rate]: 0.001 }, 2), trial(2, { [rate]: 0.01 }, 1)];
  const sweep = { fields: [rate], metric: "rmse", goal: "min", trials, best: 2 } as SweepTrials;
  expect(axesOf(sweep, [rate])[0]!.at(Math.sqrt(1e-5))).toBeCloseTo(0.5);
  expect(axesOf(sweep, [])[0]!.at(0.0055)).toBeCloseTo(0.5);
});

test("texts and mixed values have a place each", () => {
  const axis = axisOf("name", ["sgd", "adam", "sgd", null]);
  expect(axis.ticks.map(({ at, text }) => [at, text])).toEqual([
    [0, "sgd"],
    [0.5, "adam"],
    [1, "null"],
  ]);
  expect(axis.at("adagrad")).toBeUndefined();
});

test("better values of the metric are higher", () => {
  const trials = [trial(1, { [rate]: 0.1 }, 2), trial(2, { [rate]: 0.2 }, 1), trial(3, { [rate]: 0.3 }, null)];
  const sweep = { fields: [rate], metric: "validation_loss", goal: "min", trials, best: 2 } as SweepTrials;
  const axes = axesOf(sweep, []);
  expect(axes.map((axis) => axis.name)).toEqual([rate, "validation_loss"]);
  expect([2, 1, null].map(axes[1]!.at)).toEqual([0, 1, undefined]);
  expect([2, 1].map(axesOf({ ...sweep, goal: "max" }, [])[1]!.at)).toEqual([1, 0]);
});

test("names are short where they differ", () => {
  expect(shortNames([rate, "a.seed", "b.seed"])).toEqual(["learning_rate", "a.seed", "b.seed"]);
});
