/** Totals of a contributor's measurements. */
import type { Contributor } from "../api/types";

/** Measured float32 speed of all its devices together. */
export function flopsPerS(machine: Contributor): number {
  return (machine.capacity ?? []).reduce((sum, device) => sum + (device.flops_per_s?.float32 ?? 0), 0);
}

/** Memory that its owner lends: as measured; before that as declared. */
export function lentBytes(machine: Contributor): number {
  if (machine.capacity !== null) return machine.capacity.reduce((sum, device) => sum + device.memory_bytes, 0);
  return Number(machine.limits.memory_bytes ?? 0);
}

