/** Decides when the list of first steps is shown: from an empty cluster until all steps are done or dismissed. */
import { kept, Shared } from "../../kept";

const NAME = "share-compute.first-steps";

/** `unknown`: the list was never shown in this browser. */
export type Progress = "unknown" | "begun" | "over";

export interface Done {
  machine: boolean;
  job: boolean;
  model: boolean;
}

const shared = new Shared<Progress>([NAME], () => {
  const known = kept(NAME);
  return known === "begun" || known === "over" ? known : "unknown";
});

export function become(next: Progress): void {
  shared.keep(NAME, next);
}

export function useProgress(): Progress {
  return shared.use();
}

/** The progress, given the state of the cluster. A cluster that was already set up needs no first steps. */
export function after(before: Progress, { machine, job, model }: Done): Progress {
  if (before === "begun") return machine && job && model ? "over" : "begun";
  return before === "unknown" && !machine && !job ? "begun" : before;
}
