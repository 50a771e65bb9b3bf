import { expect, test } from "vitest";

import type { Held } from "../api/types";
import { beside, crosses, fits, flowsOf, neighbours, outside, overlap, route, touches } from "./lines";

const line = { from: { x: 0, y: 0 }, to: { x: 100, y: 0 } };

test("a line is interrupted at labels", () => {
  const boxes = [
    { x: 40, y: -5, width: 20, height: 10 },
    { x: 50, y: -5, width: 20, height: 10 },
    { x: 0, y: 10, width: 100, height: 10 },
  ];
  expect(outside(line, boxes)).toEqual([
    { from: { x: 0, y: 0 }, to: { x: 40, y: 0 } },
    { from: { x: 70, y: 0 }, to: { x: 100, y: 0 } },
  ]);
  expect(outside(line, [])).toEqual([line]);
  expect(outside(line, [{ x: -1, y: -1, width: 200, height: 2 }])).toEqual([]);
});

test("neighbours are as near as the reach", () => {
  expect(neighbours([{ x: 0, y: 0 }, { x: 1, y: 0 }, { x: 2, y: 0 }], 1)).toEqual([[0, 1], [1, 2]]);
});

test("lines join consecutive stages of a job, and no machines without a stage", () => {
  const holds = (id: string, stage: number | null, job: string | null = "job-1") =>
    ({ id, held: { job_id: job, deployment_id: job === null ? "dep-1" : null, stage } as Held });
  expect(flowsOf([holds("a", 0), holds("b", 1), holds("c", 1), holds("d", null), { id: "e", held: null }])).toEqual([
    { from: "a", to: "b", holder: "job-1" },
    { from: "a", to: "c", holder: "job-1" },
  ]);
  expect(flowsOf([holds("a", 0, null), holds("b", 1, null)])).toEqual([{ from: "a", to: "b", holder: "dep-1" }]);
  expect(flowsOf([holds("a", 0, null), holds("b", 1, null), holds("c", 1, null)])).toEqual([]);
});

test("a line between two islands passes beside a third one", () => {
  const picture = { width: 700, height: 600 };
  const [one, other] = [{ x: 0, y: 300, r: 50 }, { x: 600, y: 300, r: 50 }];
  expect(route(one, other, [one, other], [], picture)).toEqual([{ x: 50, y: 300 }, { x: 550, y: 300 }]);
  const third = { x: 300, y: 350, r: 60 };
  const points = route(one, other, [one, other, third], [], picture);
  expect(points.length).toBeGreaterThan(2);
  for (const { x, y } of points) expect(Math.hypot(x - third.x, y - third.y)).toBeGreaterThan(third.r);
  // With a title above the third island, the line passes below it.
  const below = route(one, other, [one, other, third], [{ x: 200, y: 0, width: 200, height: 290 }], picture);
  expect(below.every(({ y }) => y >= 300)).toBe(true);
  // A curve would leave a picture that ends just below the islands.
  const low = { width: 700, height: 415 };
  expect(route(one, other, [one, other, third], [{ x: 200, y: 0, width: 200, height: 290 }], low)).toHaveLength(2);
  expect(route(one, { x: 60, y: 300, r: 50 }, [], [], picture)).toEqual([]);
});

test("boxes overlap boxes and circles", () => {
  const box = { x: 0, y: 0, width: 10, height: 10 };
  expect(overlap(box, { ...box, x: 9 })).toBe(true);
  expect(overlap(box, { ...box, x: 10 })).toBe(false);
  expect(touches(box, { x: 15, y: 5, r: 6 })).toBe(true);
  expect(touches(box, { x: 15, y: 15, r: 6 })).toBe(false);
});

test("figures lie beside a line at any slope", () => {
  const size = { width: 60, height: 14 };
  for (const to of [{ x: 200, y: 0 }, { x: 0, y: 200 }, { x: 60, y: 200 }, { x: -150, y: 150 }, { x: 200, y: -30 }]) {
    const points = [{ x: 0, y: 0 }, to];
    const boxes = beside(points, 5, size);
    expect(boxes.filter((box) => crosses(points, 5, box))).toEqual([]);
    // Above is preferred to below.
    expect(boxes[0]!.y).toBeLessThanOrEqual(boxes[1]!.y);
  }
  expect(beside([{ x: 0, y: 0 }, { x: 200, y: 0 }], 2, size)[0]).toEqual({ x: 70, y: -17, width: 60, height: 14 });
});

test("a wide line crosses what a thin one passes", () => {
  const points = [{ x: 0, y: 0 }, { x: 50, y: 0 }, { x: 100, y: 0 }];
  const box = { x: 60, y: 2, width: 10, height: 10 };
  expect(crosses(points, 2, box)).toBe(false);
  expect(crosses(points, 6, box)).toBe(true);
  expect(crosses([{ x: 65, y: -50 }, { x: 65, y: 50 }], 1, box)).toBe(true);
});

test("a label must be inside the picture", () => {
  const picture = { width: 100, height: 50 };
  expect(fits({ x: 0, y: 0, width: 100, height: 50 }, picture)).toBe(true);
  expect(fits({ x: 10, y: -1, width: 20, height: 10 }, picture)).toBe(false);
  expect(fits({ x: 90, y: 0, width: 20, height: 10 }, picture)).toBe(false);
});
