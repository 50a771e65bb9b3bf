/** Choice of the machines that are drawn as small charts. */
import type { MachineSummary, MachineUtilization } from "../../api/types";

/** Mean of the values that were measured; null if there are none. */
export function meanOf(values: readonly (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0) / known.length;
}

/** All machines in their order; if there are more than `most`, those with the highest means, highest first. */
export function busiest(
  machines: readonly MachineSummary[],
  used: Readonly<Record<string, MachineUtilization>>,
  most: number,
): readonly MachineSummary[] {
  if (machines.length <= most) return machines;
  return machines
    .map((machine) => [meanOf(used[machine.id]?.busy ?? []) ?? -1, machine] as const)
    .sort(([one], [other]) => other - one)
    .slice(0, most)
    .map(([, machine]) => machine);
}
