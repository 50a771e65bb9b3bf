/** What the page of a machine keeps in its address. */
export const HOURS = [1, 24, 168] as const;

export interface MachineSearch {
  /** How far back its busy time is shown; 24 without it. */
  hours?: number;
}

export function machineSearch(search: Record<string, unknown>): MachineSearch {
  const hours = HOURS.find((known) => known === search.hours);
  return hours === undefined || hours === 24 ? {} : { hours };
}
