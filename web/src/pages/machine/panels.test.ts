import { expect, test } from "vitest";

import type { UtilizationSample } from "../../api/types";
import { panelsOf, seriesOf } from "./panels";

const sample = (second: number, figures: Partial<UtilizationSample>) =>
  ({ at: new Date(Date.UTC(2026, 0, 31, 12, 0, second)).toISOString(), ...figures }) as UtilizationSample;

test("only quantities with a sensor have a chart, and a chart has room for all values", () => {
  const samples = [sample(0, { cpu_fraction: 0.5, memory_bytes: 300, gpu_fraction: null }), sample(10, { cpu_fraction: 0.6, cpu_celsius: 61 })];
  expect(panelsOf(samples, 200).map(({ id, figures, top }) => [id, figures, top])).toEqual([
    ["cpu", ["cpu_fraction"], 1],
    ["memory", ["memory_bytes"], 300],
    ["temperature", ["cpu_celsius"], 100],
  ]);
  expect(panelsOf([], 200)).toEqual([]);
});

test("a line has a gap where nothing was measured for long", () => {
  const samples = [0, 10, 100].map((second) => sample(second, { cpu_fraction: second / 100 }));
  const { times, values } = seriesOf(samples, ["cpu_fraction"]);
  expect(times.map((time) => time - times[0]!)).toEqual([0, 10, 55, 100]);
  expect(values).toEqual([[0, 0.1, null, 1]]);
});
