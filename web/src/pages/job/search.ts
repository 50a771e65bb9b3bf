/** What the addresses of the job pages carry, so that a link shows what its sender saw. */
import type { JobFilter } from "../../api/queries";
import { JOB_KINDS, JOB_STATES } from "../../api/types";

export function jobsSearch(search: Record<string, unknown>): JobFilter {
  const state = JOB_STATES.find((known) => known === search.state);
  const kind = JOB_KINDS.find((known) => known === search.kind);
  // A name of digits alone is read as a number.
  const name = search.name === undefined ? "" : String(search.name);
  return { ...(state !== undefined && { state }), ...(kind !== undefined && { kind }), ...(name !== "" && { name }) };
}

export const FIGURES = ["loss", "learning_rate", "tokens_per_s", "seconds", "gradient_norm", "accuracy", "perplexity"] as const;
export type FigureName = (typeof FIGURES)[number];

export const EVENT_GROUPS = ["plan", "progress", "samples", "results", "notes"] as const;
export type EventGroup = (typeof EVENT_GROUPS)[number];

export interface JobSearch {
  /** Other jobs whose curves are drawn, too, divided by commas. */
  with?: string | undefined;
  /** First and last step shown: "100-200". */
  steps?: string | undefined;
  /** What the curves are of; the loss when it is left out. */
  curve?: FigureName | undefined;
  scale?: "log" | undefined;
  /** From 0 to 0.99. */
  smooth?: number | undefined;
  /** Which events are shown; all when it is left out. */
  events?: EventGroup | undefined;
}

export function jobSearch(search: Record<string, unknown>): JobSearch {
  const curve = FIGURES.find((known) => known === search.curve && known !== "loss");
  const events = EVENT_GROUPS.find((known) => known === search.events);
  const smooth = Number(search.smooth);
  return {
    ...(typeof search.with === "string" && search.with !== "" && { with: search.with }),
    ...(typeof search.steps === "string" && stepsOf(search.steps) !== null && { steps: search.steps }),
    ...(curve !== undefined && { curve }),
    ...(search.scale === "log" && { scale: "log" as const }),
    ...(smooth > 0 && smooth < 1 && { smooth }),
    ...(events !== undefined && { events }),
  };
}

/** "100-200" as two numbers, the smaller first; null for anything else. */
export function stepsOf(text: string | undefined): [number, number] | null {
  const found = /^(\d{1,9})-(\d{1,9})$/.exec(text ?? "");
  if (found === null) return null;
  const [first, last] = [Number(found[1]), Number(found[2])];
  return first < last ? [first, last] : null;
}
