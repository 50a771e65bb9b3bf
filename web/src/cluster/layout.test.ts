import { expect, test } from "vitest";

import { between, inRows, largestThatFits, NOWHERE, position, qualityOf, reachOf, ringsFor, settle, spiral, thickness } from "./layout";

const group = (id: string, ...machines: string[]) => ({ id, machines });

test("from nothing, places follow the order of joining", () => {
  const places = settle(NOWHERE, [group("a", "a", "b"), group("c", "c")]);
  expect([...places.cells]).toEqual([["a", 0], ["c", 1]]);
  expect([...places.slots]).toEqual([["a", 0], ["b", 1], ["c", 0]]);
});

test("who stays keeps the place when another goes, and who comes fills the gap", () => {
  const first = settle(NOWHERE, [group("a", "a", "b", "c"), group("d", "d")]);
  const without = settle(first, [group("b", "b", "c"), group("d", "d")]);
  expect(without.cells.get("b")).toBe(0);
  expect(without.cells.get("d")).toBe(1);
  expect([without.slots.get("b"), without.slots.get("c")]).toEqual([1, 2]);
  const joined = settle(without, [group("b", "b", "c", "e"), group("d", "d")]);
  expect(joined.slots.get("e")).toBe(0);
  expect(joined.slots.get("c")).toBe(2);
});

test("an island that is cut leaves the larger part where it was", () => {
  const first = settle(NOWHERE, [group("a", "a", "b", "c")]);
  const cut = settle(first, [group("a", "a"), group("b", "b", "c")]);
  expect(cut.cells.get("b")).toBe(0);
  expect(cut.cells.get("a")).toBe(1);
});

test("the spiral never puts two machines at one place", () => {
  expect([1, 2, 7, 8, 19, 20].map(ringsFor)).toEqual([0, 1, 1, 2, 2, 3]);
  const points = Array.from({ length: 91 }, (_, slot) => spiral(slot));
  for (const [place, one] of points.entries())
    for (const other of points.slice(place + 1)) expect(Math.hypot(one.x - other.x, one.y - other.y)).toBeGreaterThan(0.86);
});

test("few machines are symmetric around the middle, at equal distances", () => {
  for (const places of [1, 2, 3, 4, 5, 6, 7]) {
    const all = Array.from({ length: places }, (_, slot) => position(slot, places));
    for (const axis of ["x", "y"] as const) expect(all.reduce((sum, one) => sum + one[axis], 0)).toBeCloseTo(0);
    const mirrored = (one: { x: number; y: number }) => all.some((other) => Math.hypot(other.x + one.x, other.y - one.y) < 1e-9);
    expect(all.every(mirrored)).toBe(true);
    const nearest = all.map((one) => Math.min(...all.filter((other) => other !== one).map((other) => Math.hypot(one.x - other.x, one.y - other.y))));
    if (places > 1) for (const distance of nearest) expect(distance).toBeCloseTo(1);
    expect(Math.max(...all.map(({ x, y }) => Math.hypot(x, y)))).toBeCloseTo(reachOf(places));
  }
});

test("machines are as far apart as the map has room", () => {
  expect(largestThatFits([30, 20, 10], 45, (size) => 2 * size)).toBe(20);
  expect(largestThatFits([30, 20, 10], 5, (size) => 2 * size)).toBe(10);
});

test("circles stand in rows that are not wider than the map", () => {
  const { circles, height } = inRows([50, 50, 80], 250, { gap: 20, above: 30 });
  expect(circles.map(({ y }) => y)).toEqual([80, 80, 260]);
  for (const { x, r } of circles) expect(x - r >= 0 && x + r <= 250).toBe(true);
  expect(height).toBeGreaterThan(circles[2]!.y + 80);
});

test("a link runs from edge to edge", () => {
  expect(between({ x: 0, y: 0, r: 10 }, { x: 100, y: 0, r: 20 })).toEqual([{ x: 10, y: 0 }, { x: 80, y: 0 }]);
  expect(between({ x: 0, y: 0, r: 60 }, { x: 100, y: 0, r: 60 })).toBeNull();
});

test("links are judged by their bandwidth", () => {
  expect([1.2e9, 2e7, 1e6, 0, null].map(qualityOf)).toEqual(["good", "fair", "poor", "none", "none"]);
  expect(thickness(1e9)).toBeGreaterThan(thickness(1e7));
});
