/** Facts about a deployment that several components show. */
import type { Deployment, ReplicaStatus } from "../../api/types";

type Spec = Deployment["spec"];

export function isOver({ state }: Pick<Deployment, "state">): boolean {
  return state === "stopped" || state === "failed";
}

/** A model's short name and its source. */
export function modelOf({ model }: Pick<Spec, "model">): { short: string; full: string } {
  if (model.hub != null) return { short: model.hub, full: `${model.hub}@${model.revision ?? "main"}` };
  if (model.path == null) return { short: `${model.job}/${model.artifact}`, full: `${model.job}/${model.artifact}` };
  return { short: model.path.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) ?? model.path, full: model.path };
}

/** "2" or "0..4", in the format of the command line. */
export function range({ min, max }: { min: number; max: number }): string {
  return min === max ? `${max}` : `${min}..${max}`;
}

/** Ready and requested replicas: "1/0..4"; only the requested ones if the deployment is not up. */
export function replicasOf({ replicas, spec }: Pick<Deployment, "replicas" | "spec">): string {
  return replicas === null ? range(spec.replicas) : `${replicas.ready}/${range(spec.replicas)}`;
}

/** Sum of a figure over all replicas; null if no replica has it. */
export function sumOf(
  replicas: readonly ReplicaStatus[] | undefined,
  figure: (one: ReplicaStatus) => number,
  more = 0,
): number | null {
  return replicas === undefined ? null : replicas.reduce((sum, one) => sum + figure(one), more);
}

const LONGEST_NAME = 80;

/** A valid deployment name, made from a folder's or job's name. */
export function nameFrom(text: string): string {
  const last = text.replace(/[/\\]+$/, "").split(/[/\\]/).at(-1) ?? "";
  return last.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+|-+$/g, "").slice(0, LONGEST_NAME);
}
