/** Geometry of the chart of busy time. */
import type { BusyPoint } from "../../api/types";

/** Longest gap between two measurements of one line; a line across more would show values that nobody measured. */
const GAP_MS = 15 * 60_000;

/** Measurements by line: those of one job, without a long gap. */
export function lines(measured: readonly BusyPoint[]): BusyPoint[][] {
  const found: BusyPoint[][] = [];
  for (const one of measured) {
    const last = found.at(-1)?.at(-1);
    const isNext = last !== undefined && last.job_id === one.job_id && Date.parse(one.at) - Date.parse(last.at) <= GAP_MS;
    if (isNext) found.at(-1)!.push(one);
    else found.push([one]);
  }
  return found;
}

const STEPS_MS = [5, 10, 15, 30, 60, 120, 240, 360, 1440].map((minutes) => minutes * 60_000);

/** Round times between `begin` and `end`, at most `most` of them. */
export function ticks(begin: number, end: number, most: number): number[] {
  const step = STEPS_MS.find((one) => (end - begin) / one <= most) ?? STEPS_MS.at(-1)!;
  const found: number[] = [];
  for (let moment = Math.ceil(begin / step) * step; moment < end; moment += step) found.push(moment);
  return found.length <= most + 1 ? found : found.filter((_, place) => place % Math.ceil(found.length / most) === 0);
}
