import type { Job } from "../../api/types";

/** Tokens (samples, for a classifier) of one step, from what was asked for. */
export function tokensPerStep(job: Pick<Job, "spec">): number {
  const { training, data } = job.spec;
  return data.dataset == null ? training.batch_size * training.sequence_length : training.batch_size;
}

/** What a job's speed counts: samples that are no text have no tokens. */
export function speedUnit(job: Pick<Job, "spec">): "tok/s" | "samples/s" {
  return job.spec.data.dataset == null ? "tok/s" : "samples/s";
}

/** Seconds until the last step at the speed of the last steps; null before there is one. */
export function etaS(job: Pick<Job, "step" | "total_steps" | "tokens_per_s">, perStep: number): number | null {
  if (job.tokens_per_s === null || job.tokens_per_s <= 0) return null;
  return ((job.total_steps - job.step) * perStep) / job.tokens_per_s;
}
