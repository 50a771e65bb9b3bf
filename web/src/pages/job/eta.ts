import type { ClusterEvent, Job, Metric } from "../../api/types";

type Counted = Pick<Job, "spec" | "rows" | "step" | "total_steps">;

/** Progress of a job: steps of training, trials of a sweep, or rows of a batch. */
export function progressOf({ spec, rows, step, total_steps }: Counted): { done: number; total: number; unit: "steps" | "rows" | "trials" } {
  if (spec.kind === "train" || spec.kind === "sparse") return { done: step, total: total_steps, unit: "steps" };
  if (spec.kind === "sweep") return { done: step, total: total_steps, unit: "trials" };
  return { done: rows?.done ?? 0, total: rows?.total ?? 0, unit: "rows" };
}

/** The progress as a fraction, from 0 to 1. */
export function shareOf(job: Counted): number {
  const { done, total } = progressOf(job);
  return total === 0 ? 0 : done / total;
}

/** Whether a training job's model generates text, so that its speed is counted in tokens; otherwise in samples. */
function countsTokens({ dataset, table, images, labels, pairs }: Extract<Job["spec"], { kind: "train" }>["data"]): boolean {
  return [dataset, table, images, labels, pairs].every((part) => part == null);
}

/** The unit of a job's speed. */
export function speedUnit(job: Pick<Job, "spec">): "tok/s" | "samples/s" {
  if (job.spec.kind === "sparse") return "samples/s";
  return job.spec.kind !== "train" || countsTokens(job.spec.data) ? "tok/s" : "samples/s";
}

/** Weight of the newest step in the mean: one slow step changes the mean by at most a tenth. */
const NEWEST = 0.1;
/** Number of recent steps in the mean; the weight of earlier steps is below 0.1%. */
const RECENT = 70;
/** Number of steps whose median is the initial mean, so that a slow first step does not matter. */
const FIRST = 5;
/** A job has stalled after this many times the mean of a step, and after at least this many seconds. */
const STALL_STEPS = 10;
/** Longer than usual validations and checkpoints take, because no event reports their start. */
const LEAST_STALL_S = 60;
/** Kinds of events that count as progress without a step. */
const PROGRESS = new Set(["started", "validated", "checkpoint", "reformed"]);

/**
 * Smoothed time of one step (or row) in seconds; null without measurements. An exponentially weighted mean in which each
 * time counts for at most twice the mean before it (winsorized), so that one slow step raises it by at most 10%.
 */
export function meanSeconds(times: readonly number[]): number | null {
  const recent = times.filter((time) => Number.isFinite(time) && time > 0).slice(-RECENT);
  if (recent.length === 0) return null;
  const first = recent.slice(0, FIRST).sort((a, b) => a - b);
  const begin = first[Math.floor((first.length - 1) / 2)]!;
  return recent.reduce((mean, time) => mean + NEWEST * (Math.min(time, 2 * mean) - mean), begin);
}

/** Seconds until the last step, row or trial; null while nothing was measured. */
export function timeLeftS(job: Counted, mean: number | null): number | null {
  const { done, total } = progressOf(job);
  return mean === null ? null : Math.max(0, total - done) * mean;
}

/** Seconds without progress after which a job counts as stalled. */
export function stallLimitS(mean: number): number {
  return Math.max(LEAST_STALL_S, STALL_STEPS * mean);
}

/** The newest progress of a job that a page has seen. */
export interface Progressed {
  /** Identifies the job, its attempt and state, and its progress. */
  key: string;
  /** When the page first saw it, in ms. */
  at: number;
}

type Progressing = Counted & Pick<Job, "id" | "attempt" | "state">;

/** Return `before` if the progress is unchanged; otherwise the present progress, first seen at `now` (ms). */
export function latestProgress(before: Progressed | undefined, job: Progressing, events: readonly ClusterEvent[], now: number): Progressed {
  const seq = events.findLast((event) => PROGRESS.has(event.kind))?.seq;
  const key = [job.id, job.attempt, job.state, progressOf(job).done, seq].join(" ");
  return before?.key === key ? before : { key, at: now };
}

/** Times of measured training steps in seconds, or of the rows of a batch, from its reports. */
export function timesOf(metrics: readonly Metric[], events: readonly ClusterEvent[]): number[] {
  const steps = metrics.flatMap(({ split, data }) => (split === "train" && typeof data.seconds === "number" ? [data.seconds] : []));
  const rows = events.flatMap(({ kind, data }) => (kind === "rows" && typeof data.rows_per_s === "number" ? [1 / data.rows_per_s] : []));
  return steps.length > 0 ? steps : rows;
}
