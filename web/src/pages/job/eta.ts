import type { Job } from "../../api/types";

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

/** Whether a training job learns to write text, so that its speed is counted in tokens; otherwise in samples. */
function countsTokens({ dataset, table, images, labels, pairs }: Extract<Job["spec"], { kind: "train" }>["data"]): boolean {
  return [dataset, table, images, labels, pairs].every((part) => part == null);
}

/** Tokens (samples, for a classifier) of one step, from the specification; 0 for a batch. Each worker has a minibatch in a step. */
export function tokensPerStep(job: Pick<Job, "spec">): number {
  if (job.spec.kind === "sparse") return job.spec.training.batch_size * job.spec.training.workers;
  if (job.spec.kind !== "train") return 0;
  const { training, data } = job.spec;
  const { synchronization } = training;
  // The batch size is that of each branch, and the speed is that of all branches.
  const samples = training.batch_size * (synchronization.kind === "allreduce" ? 1 : synchronization.branches);
  return countsTokens(data) ? samples * training.sequence_length : samples;
}

/** The unit of a job's speed. */
export function speedUnit(job: Pick<Job, "spec">): "tok/s" | "samples/s" {
  if (job.spec.kind === "sparse") return "samples/s";
  return job.spec.kind !== "train" || countsTokens(job.spec.data) ? "tok/s" : "samples/s";
}

/** Seconds until the last step or row at the recent speed; null while there is no speed. */
export function etaS(job: Pick<Job, "step" | "total_steps" | "tokens_per_s" | "rows">, perStep: number): number | null {
  if (job.rows != null) return job.rows.rows_per_s ? (job.rows.total - job.rows.done) / job.rows.rows_per_s : null;
  if (job.tokens_per_s === null || job.tokens_per_s <= 0) return null;
  return (Math.max(0, job.total_steps - job.step) * perStep) / job.tokens_per_s;
}
