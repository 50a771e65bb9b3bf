/** The charts of a machine's utilization: one for each quantity that has a sensor. */
import type { UtilizationSample } from "../../api/types";

export type Figure = Exclude<keyof UtilizationSample, "at">;

export interface Panel {
  id: "cpu" | "gpu" | "memory" | "gpuMemory" | "temperature" | "network";
  unit: "share" | "bytes" | "celsius" | "rate";
  figures: Figure[];
  /** Highest value of the axis; null for the maximum of the values. */
  top: number | null;
}

/** Longest time between two samples of a line; a line across a longer gap would show values that were not measured. */
const GAP_S = 45;

const HOTTEST_C = 100;

/** The panels, with only the figures that were measured at least once. */
export function panelsOf(samples: readonly UtilizationSample[], lentBytes: number): Panel[] {
  const gpuBytes = samples.findLast((sample) => sample.gpu_total_bytes != null)?.gpu_total_bytes ?? null;
  const all: Panel[] = [
    { id: "cpu", unit: "share", figures: ["cpu_fraction", "host_cpu_fraction"], top: 1 },
    { id: "gpu", unit: "share", figures: ["gpu_fraction"], top: 1 },
    { id: "memory", unit: "bytes", figures: ["memory_bytes"], top: lentBytes > 0 ? lentBytes : null },
    { id: "gpuMemory", unit: "bytes", figures: ["gpu_memory_bytes"], top: gpuBytes },
    { id: "temperature", unit: "celsius", figures: ["cpu_celsius", "gpu_celsius"], top: HOTTEST_C },
    { id: "network", unit: "rate", figures: ["received_bytes_per_s", "sent_bytes_per_s"], top: null },
  ];
  return all.flatMap((panel) => {
    const figures = panel.figures.filter((figure) => samples.some((sample) => sample[figure] != null));
    if (figures.length === 0) return [];
    const most = Math.max(...figures.flatMap((figure) => samples.map((sample) => sample[figure] ?? 0)));
    // A machine may use more than it lends; the chart then grows.
    return [{ ...panel, figures, top: panel.top === null ? null : Math.max(panel.top, most) }];
  });
}

/** Moments in seconds and the values of these figures, with a moment without values in each gap. */
export function seriesOf(samples: readonly UtilizationSample[], figures: readonly Figure[]): { times: number[]; values: (number | null)[][] } {
  const times: number[] = [];
  const values: (number | null)[][] = figures.map(() => []);
  for (const sample of samples) {
    const at = Date.parse(sample.at) / 1000;
    const before = times.at(-1);
    if (before !== undefined && at - before > GAP_S) {
      times.push((at + before) / 2);
      values.forEach((line) => line.push(null));
    }
    times.push(at);
    values.forEach((line, place) => line.push(sample[figures[place]!] ?? null));
  }
  return { times, values };
}
