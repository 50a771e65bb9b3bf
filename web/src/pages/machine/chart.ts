/** The line of the chart of busy time. */
import type { BusyPoint } from "../../api/types";
import type { TimeSeries } from "../../components/chart/TimeChart";

/** Longest gap inside a line; a line across a longer gap would show values that were not measured. */
const GAP_MS = 15 * 60_000;

/** Moments in seconds, and fractions. A moment without a value ends the line of a job, and fills each long gap. */
export function lineOf(measured: readonly BusyPoint[]): { times: number[]; series: TimeSeries[] } {
  const times: number[] = [];
  const values: (number | null)[] = [];
  let last: BusyPoint | undefined;
  for (const one of measured) {
    const at = Date.parse(one.at);
    if (last !== undefined && (last.job_id !== one.job_id || at - Date.parse(last.at) > GAP_MS)) {
      times.push((at + Date.parse(last.at)) / 2000);
      values.push(null);
    }
    times.push(at / 1000);
    values.push(one.busy_fraction);
    last = one;
  }
  return { times, series: [{ values, ink: 0 }] };
}
