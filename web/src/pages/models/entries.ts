/** Data about an entry of the catalogue for the page of models. */
import { ApiProblem } from "../../api/problem";
import type { CatalogueEntry, MachineSummary, PlanReport } from "../../api/types";
import { nameFrom } from "../deployment/facts";

const UNITS = ["", " K", " M", " B", " T"] as const;

/** 1_100_048_384 -> "1.1 B"; the units are those of published models. */
export function parameters(value: number): string {
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : Number(value.toPrecision(2))}${UNITS[unit]}`;
}

/** The entries whose name, architecture, description or licence contains all words. */
export function found(entries: readonly CatalogueEntry[], text: string, source?: CatalogueEntry["source"]): CatalogueEntry[] {
  const words = text.toLowerCase().split(/\s+/).filter((word) => word !== "");
  return entries.filter((one) => {
    const all = [one.name, one.facts?.architecture, one.description, one.licence].join(" ").toLowerCase();
    return (source === undefined || one.source === source) && words.every((word) => all.includes(word));
  });
}

/** A valid name for a deployment of a model, which no other deployment has. */
export function freeName(name: string, taken: readonly string[]): string {
  const base = nameFrom(name) || "model";
  let free = base;
  for (let number = 2; taken.includes(free); number += 1) free = `${base.slice(0, 76)}-${number}`;
  return free;
}

/** The request for a plan that serves a model; it does not depend on the data of a job. */
export function planRequest({ model, reference }: Pick<CatalogueEntry, "model" | "reference">): object {
  const source = reference == null ? { hub: model.hub, revision: model.revision } : { path: reference };
  return {
    job: { kind: "train", name: "preview", model: source, data: { files: ["/not/looked/at.txt"] } },
    serving: {},
  };
}

/** Number of machines and tokens per second of a plan; null without a prediction. */
export function fitOf({ serving }: Pick<PlanReport, "serving">): { machines: number; tokensPerS: number } | null {
  if (serving == null) return null;
  const members = serving.plan.stages.flatMap((stage) => stage.members.map((member) => member.contributor_id));
  return { machines: new Set(members).size, tokensPerS: serving.tokens_per_s };
}

/** Whether the planner found that the machines cannot serve a model. */
export function isInfeasible(error: Error): boolean {
  return error instanceof ApiProblem && error.code === "plan-infeasible";
}

/** Whether the server is still fetching the model. */
export function isUnderWay(error: Error): boolean {
  return error instanceof ApiProblem && error.code === "fetch-under-way";
}

/** Identifies the ready machines and their work, because a plan for other machines may be wrong for these. */
export function machinesKey(machines: readonly Pick<MachineSummary, "id" | "state" | "held">[]): string {
  return machines
    .filter(({ state }) => state === "ready")
    .map(({ id, held }) => `${id} ${held?.job_id ?? held?.deployment_id ?? ""}`)
    .sort()
    .join(",");
}
