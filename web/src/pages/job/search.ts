/** Search parameters of the job pages, so that a shared link shows the same view. */
import type { JobFilter } from "../../api/queries";
import { JOB_KINDS, JOB_STATES } from "../../api/types";

export function jobsSearch(search: Record<string, unknown>): JobFilter {
  const state = JOB_STATES.find((known) => known === search.state);
  const kind = JOB_KINDS.find((known) => known === search.kind);
  // The router parses a name that consists of digits as a number.
  const name = search.name === undefined ? "" : String(search.name);
  const tag = search.tag === undefined ? "" : String(search.tag);
  return {
    ...(state !== undefined && { state }),
    ...(kind !== undefined && { kind }),
    ...(name !== "" && { name }),
    ...(tag !== "" && { tag }),
    ...(search.trials === true && { trials: true as const }),
  };
}

/** Metrics of validations beside the loss. */
export const METRICS = ["accuracy", "top_5_accuracy", "f1", "auroc", "rmse", "mae", "r2", "perplexity"] as const;
export type MetricName = (typeof METRICS)[number];
export const FIGURES = ["loss", "learning_rate", "tokens_per_s", "seconds", "gradient_norm", ...METRICS] as const;
/** A figure of all tasks, or of one of several tasks: `digit.accuracy`. */
export type FigureName = (typeof FIGURES)[number] | `${string}.${FigureOfTask}`;
/** Figures that a task among several has. */
export type FigureOfTask = MetricName | "loss";

/** The figure without the name of its task, and this name; undefined if the figure covers all tasks. */
export function taskOf(figure: FigureName): { figure: (typeof FIGURES)[number]; task: string | undefined } {
  const dot = figure.indexOf(".");
  const name = figure.slice(dot + 1) as (typeof FIGURES)[number];
  return { figure: name, task: dot < 0 ? undefined : figure.slice(0, dot) };
}

function isFigure(text: string): text is FigureName {
  const { figure, task } = taskOf(text as FigureName);
  if (task === undefined) return FIGURES.includes(figure);
  return /^[a-z][a-z0-9_]{0,39}$/.test(task) && (figure === "loss" || METRICS.some((metric) => metric === figure));
}

export const EVENT_GROUPS = ["plan", "progress", "samples", "results", "notes"] as const;
export type EventGroup = (typeof EVENT_GROUPS)[number];

/** Tabs below the curves and the placement, one of which is shown. */
export const PARTS = ["step", "rounds", "plan", "predictions", "samples", "results"] as const;
export type Part = (typeof PARTS)[number];

export interface JobSearch {
  /** Ids of other jobs whose curves are also drawn, separated by commas. */
  with?: string | undefined;
  /** First and last step shown: "100-200". */
  steps?: string | undefined;
  /** The figure of the curves; default: the loss. */
  curve?: FigureName | undefined;
  scale?: "log" | undefined;
  /** Weight of the running mean, from 0 to 0.99. */
  smooth?: number | undefined;
  /** The group of events that is shown; default: all. */
  events?: EventGroup | undefined;
  /** The tab that is shown; the default depends on the job's state. */
  part?: Part | undefined;
}

export function jobSearch(search: Record<string, unknown>): JobSearch {
  const named = String(search.curve ?? "");
  const curve = named !== "loss" && isFigure(named) ? named : undefined;
  const events = EVENT_GROUPS.find((known) => known === search.events);
  const part = PARTS.find((known) => known === search.part);
  const smooth = Number(search.smooth);
  return {
    ...(typeof search.with === "string" && search.with !== "" && { with: search.with }),
    ...(typeof search.steps === "string" && stepsOf(search.steps) !== null && { steps: search.steps }),
    ...(curve !== undefined && { curve }),
    ...(search.scale === "log" && { scale: "log" as const }),
    ...(smooth > 0 && smooth < 1 && { smooth }),
    ...(events !== undefined && { events }),
    ...(part !== undefined && { part }),
  };
}

/** Parse "100-200" as two numbers, the smaller first; null for any other text. */
export function stepsOf(text: string | undefined): [number, number] | null {
  const found = /^(\d{1,9})-(\d{1,9})$/.exec(text ?? "");
  if (found === null) return null;
  const [first, last] = [Number(found[1]), Number(found[2])];
  return first < last ? [first, last] : null;
}
