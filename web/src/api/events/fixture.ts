import type { ClusterEvent } from "../types";

/** An event for tests. */
export const eventOf = (kind: string, data: Record<string, unknown>, seq = 1): ClusterEvent => ({
  seq,
  kind,
  data,
  job_id: "job-1",
  contributor_id: null,
  attempt: 1,
  at: "2026-01-31T12:00:00Z",
});
