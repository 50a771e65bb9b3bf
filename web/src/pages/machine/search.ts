/** Search parameters of the machine page. */
export const HOURS = [1, 24, 168] as const;

export interface MachineSearch {
  /** Number of past hours in the chart of busy time; default: 1. */
  hours?: number;
}

export function machineSearch(search: Record<string, unknown>): MachineSearch {
  const hours = HOURS.find((known) => known === search.hours);
  return hours === undefined || hours === 1 ? {} : { hours };
}
