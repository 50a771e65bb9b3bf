import { useQuery } from "@tanstack/react-query";

import { utilization } from "../api/queries";
import type { UtilizationSample } from "../api/types";

export type Utilizations = Readonly<Record<string, UtilizationSample>>;

const NOTHING: Utilizations = {};

/** The present utilization of the machines that reported in the last minute, by id. */
export function useUtilization(): Utilizations {
  const { data } = useQuery({ ...utilization(), select: ({ machines }) => Object.fromEntries(Object.entries(machines).map(([id, { latest }]) => [id, latest])) });
  return data ?? NOTHING;
}
