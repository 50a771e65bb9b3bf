import { expect, test } from "vitest";

import type { Held } from "../api/types";
import { flowsOf, neighbours, outside } from "./lines";

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
