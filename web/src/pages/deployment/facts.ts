/** What is said of a deployment in several places. */
import type { Deployment, ReplicaStatus } from "../../api/types";

type Spec = Deployment["spec"];

export function isOver({ state }: Pick<Deployment, "state">): boolean {
  return state === "stopped" || state === "failed";
}

/** A model's short name and where it comes from. */
export function modelOf({ model }: Pick<Spec, "model">): { short: string; full: string } {
  if (model.path == null) return { short: `${model.job}/${model.artifact}`, full: `${model.job}/${model.artifact}` };
  return { short: model.path.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) ?? model.path, full: model.path };
}

/** "2" or "0..4", as the command line takes it. */
export function range({ min, max }: { min: number; max: number }): string {
  return min === max ? `${max}` : `${min}..${max}`;
}

/** Replicas that answer, of those asked for: "1/0..4"; what was asked for where nothing serves it. */
export function replicasOf({ replicas, spec }: Pick<Deployment, "replicas" | "spec">): string {
  return replicas === null ? range(spec.replicas) : `${replicas.ready}/${range(spec.replicas)}`;
}

/** A figure of all replicas together; null where none is known. */
export function sumOf(
  replicas: readonly ReplicaStatus[] | undefined,
  figure: (one: ReplicaStatus) => number,
  more = 0,
): number | null {
  return replicas === undefined ? null : replicas.reduce((sum, one) => sum + figure(one), more);
}

const LONGEST_NAME = 80;

/** A name that clients can send, made of a folder's or a job's. */
export function nameFrom(text: string): string {
  const last = text.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) ?? "";
  return last.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+|-+$/g, "").slice(0, LONGEST_NAME);
}
