import { expect, test } from "vitest";

import { lines, ticks } from "./chart";
import { machineSearch } from "./search";

const point = (at: string, job: string) => ({ at: `2026-01-31T${at}:00Z`, busy_fraction: 0.5, job_id: job });

test("a line ends with its job, and where nothing was measured for long", () => {
  const measured = [point("12:00", "a"), point("12:05", "a"), point("13:00", "a"), point("13:01", "b")];
  expect(lines(measured).map((line) => line.length)).toEqual([2, 1, 1]);
});

test("ticks are round and few", () => {
  const begin = Date.parse("2026-01-31T12:07:00Z");
  const hour = ticks(begin, begin + 3_600_000, 6);
  expect(hour.map((moment) => new Date(moment).getUTCMinutes())).toEqual([10, 20, 30, 40, 50, 0]);
  expect(ticks(begin, begin + 7 * 86_400_000, 6).length).toBeLessThanOrEqual(7);
});

test("only ranges that the page offers stand in the address", () => {
  expect([1, 24, 168, 5].map((hours) => machineSearch({ hours }))).toEqual([{}, { hours: 24 }, { hours: 168 }, {}]);
});
