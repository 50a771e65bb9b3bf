/** When the list of first steps is shown: from a cluster without machines and jobs until all is done or dismissed. */
import { kept, Shared } from "../../kept";

const NAME = "share-compute.first-steps";

/** `unknown`: nobody has seen the list in this browser. */
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

/** The progress after the cluster was looked at. A cluster that others have set up already needs no first steps. */
export function after(before: Progress, { machine, job, model }: Done): Progress {
  if (before === "begun") return machine && job && model ? "over" : "begun";
  return before === "unknown" && !machine && !job ? "begun" : before;
}
