import { expect, test } from "vitest";

import { placesOf, shareOf } from "./Pictures";

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
