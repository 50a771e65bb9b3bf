/** Columns of the table of jobs: properties of a job, its results, and the fields of its job file. */
import type { Job, JobPage } from "../../api/types";
import { nameOfResult } from "../job/figures";
import { shareOf, speedUnit } from "../job/eta";

/** A job with its last metrics by name. */
export type Run = Job & { results: Record<string, number> };

/** Properties of a job that are columns, with their names as keys of `t`. */
export const PROPERTIES = {
  state: "State",
  progress: "Progress",
  loss: "Loss",
  speed: "Speed",
  time: "Run time",
  created: "Created",
  tags: "Tags",
  note: "Note",
  group: "Group",
  kind: "Kind",
  sweep: "Sweep",
} as const;
export type Property = keyof typeof PROPERTIES;
/** `name`, a property, `results.` and the name of a result, or `spec.` and the name of a field with dots. */
export type ColumnKey = "name" | Property | `results.${string}` | `spec.${string}`;

const LABELS = ["name", "tags", "group"];
/** Properties of which groups offer their jobs. */
export const GROUPING = ["state", "kind", "tags", "group", "sweep"] as const satisfies readonly Property[];

export function isColumn(text: string): text is ColumnKey {
  return text === "name" || Object.hasOwn(PROPERTIES, text) || /^(results|spec)\../.test(text);
}

/** The jobs of all pages with their results. */
export function runsOf(pages: readonly JobPage[]): Run[] {
  return pages.flatMap(({ jobs, results }) => jobs.map((job) => ({ ...job, results: results[job.id] ?? {} })));
}

/**
 * The leaf fields of a job file, by their dotted names: `training.optimizer.name`, `model.layers.0.type`. The server's
 * comparison of jobs names them in the same way.
 */
export function fieldsOf(spec: Job["spec"]): Map<string, unknown> {
  const found = new Map<string, unknown>();
  const visit = (node: object, prefix: string) => {
    for (const [name, value] of Object.entries(node) as [string, unknown][]) {
      if (prefix === "" && LABELS.includes(name)) continue;
      const hasParts = Array.isArray(value) ? value.some(isObject) : isObject(value) && Object.keys(value).length > 0;
      if (hasParts) visit(value as object, `${prefix}${name}.`);
      else found.set(prefix + name, value);
    }
  };
  visit(spec, "");
  return found;
}

function isObject(value: unknown): value is object {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

const fieldsBySpec = new WeakMap<object, Map<string, unknown>>();

function knownFields(spec: Job["spec"]): Map<string, unknown> {
  let fields = fieldsBySpec.get(spec);
  if (fields === undefined) fieldsBySpec.set(spec, (fields = fieldsOf(spec)));
  return fields;
}

export interface Fields {
  /** Names of the fields that are not the same in all job files, in the order of the job file. */
  differing: string[];
  equal: string[];
}

/** All fields of these jobs. A field that a job file lacks counts as null, as in the server's comparison. */
export function fieldsAmong(runs: readonly Run[]): Fields {
  const values = new Map<string, Set<string>>();
  for (const { spec } of runs) for (const name of knownFields(spec).keys()) values.set(name, new Set());
  for (const [name, seen] of values) for (const { spec } of runs) seen.add(JSON.stringify(knownFields(spec).get(name) ?? null));
  const names = [...values.keys()];
  return {
    differing: names.filter((name) => values.get(name)!.size > 1),
    equal: names.filter((name) => values.get(name)!.size <= 1),
  };
}

/** Names of the results that some of these jobs have; the loss of training is a property of the job. */
export function resultsAmong(runs: readonly Run[]): string[] {
  return [...new Set(runs.flatMap((run) => Object.keys(run.results)))].filter((name) => name !== "loss");
}

/** Value of a job in a column, for sorting and grouping; null if there is none. `now` is in ms. */
export function valueOf(run: Run, column: ColumnKey, now: number): unknown {
  if (column.startsWith("results.")) return run.results[column.slice("results.".length)] ?? null;
  if (column.startsWith("spec.")) return knownFields(run.spec).get(column.slice("spec.".length)) ?? null;
  switch (column as "name" | Property) {
    case "name":
      return run.name;
    case "state":
      return run.state;
    case "progress":
      return shareOf(run);
    case "loss":
      return run.loss;
    case "speed":
      return run.tokens_per_s;
    case "time":
      return run.started_at === null ? null : ((run.finished_at === null ? now : Date.parse(run.finished_at)) - Date.parse(run.started_at)) / 1000;
    case "created":
      return run.created_at;
    case "tags":
      return run.tags.length === 0 ? null : run.tags.join(", ");
    case "note":
      return run.note === "" ? null : run.note;
    case "group":
      return run.group ?? null;
    case "kind":
      return run.spec.kind;
    case "sweep":
      return run.sweep_id ?? null;
  }
}

/**
 * Compare two values in ascending order: numbers before texts; numbers inside texts count as numbers ("run 9" before
 * "run 10").
 */
function compare(one: unknown, other: unknown): number {
  if (typeof one === "number" && typeof other === "number") return one - other;
  if (typeof one === "number") return -1;
  if (typeof other === "number") return 1;
  return textOf(one).localeCompare(textOf(other), "en", { numeric: true });
}

function textOf(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** The jobs sorted by a column; jobs without a value are last in both directions. Equal jobs keep their order. */
export function sorted(runs: readonly Run[], column: ColumnKey, isDescending: boolean, now: number): Run[] {
  const keyed = runs.map((run) => ({ run, value: valueOf(run, column, now) }));
  keyed.sort((one, other) => {
    if (one.value === null || other.value === null) return Number(one.value === null) - Number(other.value === null);
    return isDescending ? compare(other.value, one.value) : compare(one.value, other.value);
  });
  return keyed.map(({ run }) => run);
}

export interface RunGroup {
  /** Common value of the jobs in the column of the groups; null if they have none. */
  value: unknown;
  runs: Run[];
}

/** Groups of jobs with equal values in a column, in the order of their first jobs; jobs without a value are last. */
export function grouped(runs: readonly Run[], column: ColumnKey, now: number): RunGroup[] {
  const groups = new Map<string, RunGroup>();
  for (const run of runs) {
    const value = valueOf(run, column, now);
    const key = JSON.stringify(value);
    const group = groups.get(key) ?? { value, runs: [] };
    group.runs.push(run);
    groups.set(key, group);
  }
  return [...groups.values()].sort((one, other) => Number(one.value === null) - Number(other.value === null));
}

const HIGHER_IS_BETTER = ["accuracy", "f1", "auroc", "r2"];
const LOWER_IS_BETTER = ["loss", "rmse", "mae", "perplexity", "gap"];

/** Whether lower or higher values of a result or property are better; undefined if unknown. */
export function goalOf(column: ColumnKey): "min" | "max" | undefined {
  if (column === "speed") return "max";
  if (column !== "loss" && !column.startsWith("results.")) return undefined;
  const name = column.split(/[._]/).at(-1)!;
  if (HIGHER_IS_BETTER.includes(name)) return "max";
  return LOWER_IS_BETTER.includes(name) ? "min" : undefined;
}

/** The job with the best number in a column, and this number; undefined if no job has one, or if no order is known. */
export function bestOf(runs: readonly Run[], column: ColumnKey, now: number): { run: Run; value: number } | undefined {
  const goal = goalOf(column);
  const known = runs.flatMap((run) => {
    const value = valueOf(run, column, now);
    return typeof value === "number" && Number.isFinite(value) ? [{ run, value }] : [];
  });
  if (goal === undefined || known.length === 0) return undefined;
  if (column === "speed" && new Set(known.map(({ run }) => speedUnit(run))).size > 1) return undefined;
  return known.reduce((best, one) => ((goal === "min" ? one.value < best.value : one.value > best.value) ? one : best));
}

/** Metrics that are columns by default, with the main one of each task. */
const MAIN_METRICS = ["loss", "accuracy", "rmse", "perplexity"];
const MOST_METRICS = 3;

/** Default columns: properties, and the main metrics of validations, or of tests if no job has validations. */
export function defaultColumns(runs: readonly Run[]): ColumnKey[] {
  const known = resultsAmong(runs);
  const ofSplit = (split: string) => MAIN_METRICS.map((metric) => `${split}_${metric}`).filter((name) => known.includes(name));
  const [validation, test] = [ofSplit("validation"), ofSplit("test")];
  const results = (validation.length > 0 ? validation : test).slice(0, MOST_METRICS);
  return ["state", "progress", "loss", ...results.map((name): ColumnKey => `results.${name}`), "speed", "time", "created", "tags", "note"];
}

/** Last part of a field's name, or more of it if another shown field has the same last part. */
export function nameOfColumn(column: ColumnKey, shown: readonly ColumnKey[], t: (key: string) => string): string {
  if (column === "name") return t("Job");
  if (column.startsWith("results.")) return nameOfResult(column.slice("results.".length));
  if (!column.startsWith("spec.")) return t(PROPERTIES[column as Property]);
  const parts = column.split(".");
  const isLast = shown.filter((one) => one.startsWith("spec.") && one.split(".").at(-1) === parts.at(-1)).length <= 1;
  return isLast ? parts.at(-1)! : parts.slice(1).slice(-2).join(".");
}
