import { expect, test } from "vitest";

import { joined, layerRange, poolShares, ranges } from "./layout";

const pool = (start: number, stop: number) => ({ start, stop, parameters: 1, members: [] });

test("pools take their share of the bar", () => {
  expect(poolShares({ num_layers: 4, pools: [pool(0, 1), pool(1, 4)] })).toEqual([0.25, 0.75]);
});

test("a small pool beside a large one is still seen, and the bar stays whole", () => {
  const shares = poolShares({ num_layers: 1000, pools: [pool(0, 1), pool(1, 1000)] });
  expect(shares[0]).toBeGreaterThan(0.038);
  expect(shares.reduce((sum, share) => sum + share)).toBeCloseTo(1);
});

test("ranges are written with both ends", () => {
  expect(layerRange({ start: 3, stop: 8 })).toBe("3–7");
  expect(layerRange({ start: 3, stop: 4 })).toBe("3");
  expect(ranges([5, 0, 1, 2])).toBe("0–2, 5");
  expect(ranges([])).toBe("");
});

test("names are joined as in a sentence", () => {
  expect(joined(["ash", "birch", "cedar"])).toBe("ash, birch, and cedar");
});
