import { useQueries, type UseQueryResult } from "@tanstack/react-query";

import { job } from "../api/queries";
import type { Job, MachineSummary } from "../api/types";

/** Maximum number of jobs that are fetched for it. */
const MOST_JOBS = 8;

/** Fraction of a training step in which each machine computes, by machine id; only of machines that were measured. */
export function useUtilization(machines: readonly MachineSummary[]): Readonly<Record<string, number>> {
  const ids = new Set(machines.flatMap(({ held }) => held?.job_id ?? []));
  return useQueries({ queries: [...ids].slice(0, MOST_JOBS).map(job), combine: utilizationOf });
}

function utilizationOf(jobs: UseQueryResult<Job>[]): Record<string, number> {
  return Object.fromEntries(
    jobs.flatMap(({ data }) => {
      const { machines = {}, measured_step_s: step } = data?.measured ?? { measured_step_s: 0 };
      return step > 0 ? Object.entries(machines).map(([id, busy]) => [id, Math.min(1, busy / step)] as const) : [];
    }),
  );
}
