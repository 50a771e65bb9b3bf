import { expect, test } from "vitest";

import type { Job, JobPage, Metric } from "../../api/types";
import { laidOut } from "../../components/chart/coordinates";
import { axisOf } from "../job/sweep/parallel";
import { bestOf, defaultColumns, fieldsAmong, fieldsOf, goalOf, grouped, nameOfColumn, runsOf, sorted, type Run } from "./columns";
import { curvesOfRuns, valuesAt, valuesWithin } from "./curves";
import { tagsIn } from "./labels";
import { rangeWithoutOutliers } from "./range";
import { columnsIn, compareSearch, idsIn, runsSearch, sortIn } from "./search";

const NOW = Date.parse("2026-01-01T00:01:00Z");

function run(id: string, rate: number | null, results: Record<string, number> = {}, more: Partial<Job> = {}): Run {
  const spec = { kind: "train", name: id, tags: [], group: null, model: { layers: [{ type: "linear" }] }, training: { steps: 4, optimizer: { learning_rate: rate } } };
  const job = { id, name: `run ${id}`, state: "succeeded", spec, step: 2, total_steps: 4, loss: 1, tags: [], note: "", started_at: "2026-01-01T00:00:00Z", finished_at: null, ...more };
  return { ...(job as unknown as Job), results };
}

const ids = (runs: readonly Run[]) => runs.map(({ id }) => id).join(" ");

test("fields have the names of the server's comparison, and labels are none", () => {
  const spec = { kind: "train", name: "a", tags: ["b"], model: { layers: [{ type: "linear", options: {} }], shape: [1, 2] }, lora: null };
  expect(Object.fromEntries(fieldsOf(spec as unknown as Job["spec"]))).toEqual({
    "kind": "train",
    "model.layers.0.type": "linear",
    "model.layers.0.options": {},
    "model.shape": [1, 2],
    "lora": null,
  });
});

test("fields that differ are separate from those that are equal", () => {
  const { differing, equal } = fieldsAmong([run("a", 0.1), run("b", 0.2)]);
  expect(differing).toEqual(["training.optimizer.learning_rate"]);
  expect(equal).toEqual(["kind", "model.layers.0.type", "training.steps"]);
  expect(fieldsAmong([run("a", 0.1)]).differing).toEqual([]);
});

test("jobs are sorted by any column; those without a value are last", () => {
  const runs = [run("10", null), run("9", 0.2, { validation_loss: 3 }), run("8", 0.1, { validation_loss: 4 })];
  expect(ids(sorted(runs, "name", false, NOW))).toBe("8 9 10");
  expect(ids(sorted(runs, "spec.training.optimizer.learning_rate", false, NOW))).toBe("8 9 10");
  expect(ids(sorted(runs, "spec.training.optimizer.learning_rate", true, NOW))).toBe("9 8 10");
  expect(ids(sorted(runs, "results.validation_loss", true, NOW))).toBe("8 9 10");
  expect(ids(sorted([run("a", 1), run("b", 1, {}, { finished_at: "2026-01-01T00:00:10Z" })], "time", false, NOW))).toBe("b a");
});

test("groups have the jobs with one value, and their best result", () => {
  const runs = [run("a", null, { test_f1: 0.5 }), run("b", 0.1, { test_f1: 0.7 }), run("c", 0.1, { test_f1: 0.9 })];
  const groups = grouped(runs, "spec.training.optimizer.learning_rate", NOW);
  expect(groups.map(({ value, runs }) => [value, ids(runs)])).toEqual([
    [0.1, "b c"],
    [null, "a"],
  ]);
  expect(bestOf(groups[0]!.runs, "results.test_f1", NOW)).toMatchObject({ run: { id: "c" }, value: 0.9 });
  expect(bestOf(groups[0]!.runs, "results.validation_loss", NOW)).toBeUndefined();
  expect((["results.test_top_5_accuracy", "results.validation_digit.loss", "speed", "results.x", "spec.loss"] as const).map(goalOf)).toEqual(["max", "min", "max", undefined, undefined]);
});

test("the best speed is that of jobs with one unit, also after their end", () => {
  const moving = (id: string, speed: number, more: object = {}) => {
    const made = run(id, 1, {}, { tokens_per_s: speed, state: "running", ...more });
    return { ...made, spec: { ...made.spec, data: {} } } as Run;
  };
  const ended = moving("a", 900, { state: "succeeded" });
  expect(bestOf([ended, moving("b", 10), moving("c", 20)], "speed", NOW)).toMatchObject({ run: { id: "a" }, value: 900 });
  const ofSamples = { ...moving("d", 30), spec: { kind: "sparse" } } as unknown as Run;
  expect(bestOf([moving("b", 10), ofSamples], "speed", NOW)).toBeUndefined();
});

test("columns are named by the last parts of fields that tell them apart", () => {
  const shown = ["spec.a.name", "spec.b.name", "spec.a.rate"] as const;
  expect(shown.map((column) => nameOfColumn(column, shown, String))).toEqual(["a.name", "b.name", "rate"]);
  expect(nameOfColumn("results.validation_loss", shown, String)).toBe("Loss (validation)");
});

test("the main metrics of all tasks are shown by default, those of tests only without validations", () => {
  const shown = (...runs: Run[]) => defaultColumns(runs).filter((column) => column.startsWith("results."));
  const text = run("a", 1, { "loss": 1, "validation_loss": 2, "validation_perplexity": 7, "validation_x.loss": 3, "test_loss": 4 });
  const digits = run("b", 1, { validation_loss: 2, validation_accuracy: 0.9, validation_f1: 0.8 });
  expect(shown(text, digits)).toEqual(["results.validation_loss", "results.validation_accuracy", "results.validation_perplexity"]);
  expect(shown(run("c", 1, { loss: 1, test_accuracy: 0.9 }))).toEqual(["results.test_accuracy"]);
});

test("jobs of all pages have their results", () => {
  const { results: _, ...job } = run("a", 1);
  const page = { jobs: [job, { ...job, id: "b" }], results: { b: { loss: 2 } }, next_cursor: null } as JobPage;
  expect(runsOf([page]).map(({ id, results }) => [id, results])).toEqual([
    ["a", {}],
    ["b", { loss: 2 }],
  ]);
});

test("addresses keep the view, and nothing else", () => {
  expect(runsSearch({ state: "failed", columns: "loss,nonsense,spec.a.b,loss", sort: "-results.loss", by: "toString" })).toEqual({
    state: "failed",
    columns: "loss,spec.a.b",
    sort: "-results.loss",
  });
  expect(columnsIn("constructor,spec.,results.x")).toEqual(["results.x"]);
  expect([sortIn("-loss"), sortIn("name"), sortIn(undefined)]).toEqual([{ column: "loss", isDescending: true }, { column: "name", isDescending: false }, undefined]);
  expect(compareSearch({ jobs: "a,b", outliers: true, hidden: 3, curve: "accuracy", steps: "1-5", smooth: 2 })).toEqual({ jobs: "a,b", outliers: true, curve: "accuracy", steps: "1-5" });
  expect(idsIn("a,,b,a")).toEqual(["a", "b"]);
  expect(tagsIn(" a, b，c,,a")).toEqual(["a", "b", "c"]);
});

test("outliers of the first steps do not stretch the axis, and no curve is cut off as a whole", () => {
  const falling = [900, 12, 3, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, null];
  const { range, outside } = rangeWithoutOutliers([falling])!;
  expect(outside).toBe(2);
  expect(range[1]).toBeCloseTo(3 + 0.05 * 0.6);
  expect(range[0]).toBeCloseTo(2.4 - 0.05 * 0.6);
  const far = [50, 50, 50, 50, 50, 51];
  expect(rangeWithoutOutliers([falling, far])!.range[1]).toBeGreaterThan(50);
  expect(rangeWithoutOutliers([[1, 2, 3]])).toBeNull();
  expect(rangeWithoutOutliers([[1000, 1]])).toBeNull();
  expect(rangeWithoutOutliers([[], [null]])).toBeNull();
});

test("curves have the colour of their run, and dashes for validations", () => {
  const metric = (split: "train" | "validation", step: number, loss: number): Metric => ({ split, step, data: { loss } });
  const runs = [
    { name: "a", colour: "red", place: 0, metrics: [metric("train", 1, 4), metric("train", 2, 3), metric("validation", 2, 5)] },
    { name: "c", colour: "blue", place: 2, metrics: [metric("train", 1, 2)] },
  ];
  const { steps, curves } = curvesOfRuns(runs, "loss", 0);
  expect(curves.map(({ ink, colour, isDashed, isSparse }) => [ink, colour, isDashed, isSparse])).toEqual([
    [0, "red", false, false],
    [0, "red", true, true],
    [2, "blue", false, false],
  ]);
  expect([...valuesAt(curves, null)]).toEqual([
    [0, { train: 3, validation: 5 }],
    [2, { train: 2, validation: null }],
  ]);
  expect(valuesAt(curves, 0).get(0)).toEqual({ train: 4, validation: null });
  expect(valuesWithin(steps, curves, [2, 9])).toEqual([[3], [5], [null]]);
  expect(curvesOfRuns(runs.slice(1), "loss", 0).curves.map(({ ink, colour }) => [ink, colour])).toEqual([[2, "blue"]]);
});

test("parallel axes have equal distances, and lines leave out axes without a value", () => {
  const axes = [axisOf("rate", [1, 2]), axisOf("name", ["a", "b"]), axisOf("loss", [5, 6], { isFlipped: true })];
  const { width, x, top, bottom, names, paths } = laidOut(axes, [[1, "a", 5], [2, "b", null], [null, null, null]], 640, 200);
  expect([width, x, top, bottom]).toEqual([640, [70, 320, 570], 32, 188]);
  expect(paths).toEqual(["M70.0 188.0L320.0 188.0L570.0 32.0", "M70.0 32.0L320.0 32.0", ""]);
  expect(new Set(names.map(({ y }) => y)).size).toBe(1);
  const narrow = laidOut(axes, [], 100, 200);
  expect([narrow.width, narrow.x]).toEqual([240, [44, 120, 196]]);
  expect(new Set(narrow.names.map(({ y }) => y)).size).toBe(2);
  expect(narrow.names.map(({ anchor }) => anchor)).toEqual(["start", "middle", "end"]);
  expect(laidOut([...axes, axisOf("size", [1, 2])], [], 320, 200).width).toBe(320);
});
