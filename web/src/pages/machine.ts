/** Totals of a contributor's measurements. */
import type { Contributor } from "../api/types";

/** Measured float32 speed of all devices of the machine together. */
export function flopsPerS(machine: Contributor): number {
  return (machine.capacity ?? []).reduce((sum, device) => sum + (device.flops_per_s?.float32 ?? 0), 0);
}

/** Memory that the owner lends: the measured value, or the declared one before the measurement. */
export function lentBytes(machine: Contributor): number {
  if (machine.capacity !== null) return machine.capacity.reduce((sum, device) => sum + device.memory_bytes, 0);
  return Number(machine.limits.memory_bytes ?? 0);
}

