import { useQuery } from "@tanstack/react-query";

import { utilization } from "../api/queries";
import type { ClusterUtilization, UtilizationSample } from "../api/types";

export type Utilizations = Readonly<Record<string, UtilizationSample>>;

const NOTHING: Utilizations = {};

/** Defined outside the hook, because a new function would be called in each render. */
function latestOf({ machines }: ClusterUtilization): Utilizations {
  return Object.fromEntries(Object.entries(machines).map(([id, { latest }]) => [id, latest]));
}

/** The present utilization of the machines that reported in the last minute, by id. */
export function useUtilization(): Utilizations {
  const { data } = useQuery({ ...utilization(), select: latestOf });
  return data ?? NOTHING;
}
