import { expect, test } from "vitest";

import { placesOf, shareOf, ticksOf } from "./Pictures";

test("shares are those of a class, and of an empty class none", () => {
  expect(shareOf(3, [3, 1])).toBe(0.75);
  expect(shareOf(0, [0, 0])).toBe(0);
});

test("equal values are on the rising line, also if there is only one", () => {
  const { places, low, high } = placesOf([[0, 0], [5, 5], [10, 10]]);
  expect([low, high]).toEqual([0, 10]);
  for (const [x, y] of places) expect(x + y).toBe(320);
  expect(placesOf([[2, 2]]).places).toEqual([[8, 312]]);
});

test("ticks are few round numbers between the lowest and the highest value", () => {
  expect(ticksOf(25, 346)).toEqual([100, 200, 300]);
  expect(ticksOf(-1, 1)).toEqual([-1, -0.5, 0, 0.5, 1]);
  expect(ticksOf(7, 7)).toEqual([7]);
  for (const [low, high] of [[0, 1], [-3e6, 9e9], [1e-9, 3e-9], [0.1, 0.11]] as const) {
    const ticks = ticksOf(low, high);
    expect(ticks.length).toBeGreaterThanOrEqual(2);
    expect(ticks.length).toBeLessThanOrEqual(6);
    for (const tick of ticks) expect(tick >= low && tick <= high * (1 + 1e-9)).toBe(true);
  }
});
