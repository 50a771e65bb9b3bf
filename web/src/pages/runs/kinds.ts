import type { JobKind } from "../../api/types";

/** Names of the kinds of jobs, as keys of `t`. */
export const KINDS: Record<JobKind, string> = { train: "training", generate: "answers of a model", embed: "vectors of texts", sparse: "sparse model", sweep: "sweep" };
