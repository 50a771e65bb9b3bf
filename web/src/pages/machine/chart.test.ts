import { expect, test } from "vitest";

import { lineOf } from "./chart";
import { machineSearch } from "./search";

const point = (at: string, job: string) => ({ at: `2026-01-31T${at}:00Z`, busy_fraction: 0.5, job_id: job });

test("a line ends with its job, and where nothing was measured for long", () => {
  const measured = [point("12:00", "a"), point("12:05", "a"), point("13:00", "a"), point("13:01", "b")];
  const { times, series } = lineOf(measured);
  expect(series[0]!.values).toEqual([0.5, 0.5, null, 0.5, null, 0.5]);
  expect(times.map((time) => time - times[0]!)).toEqual([0, 300, 1950, 3600, 3630, 3660]);
});

test("only ranges that the page offers stand in the address", () => {
  expect([1, 24, 168, 5].map((hours) => machineSearch({ hours }))).toEqual([{}, { hours: 24 }, { hours: 168 }, {}]);
});
