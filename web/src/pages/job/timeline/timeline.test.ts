import { expect, test } from "vitest";

import type { Plan, PlanTimeline } from "../../../api/types";
import { bubbleOf, rowsOf, ticksOf } from "./timeline";

test("a machine waits for whatever is neither a cell nor its update", () => {
  const member = (name: string) => ({ contributor_id: name, name, microbatches: [0], memory_bytes: 1, reason: "" });
  const plan = { stages: [{ start: 0, stop: 1, parameters: 1, members: [member("ash"), member("idle")] }] } as unknown as Plan;
  const cell = (kind: "F" | "B", start_s: number, stop_s: number) => ({ stage: 0, member: 0, microbatch: 0, kind, start_s, stop_s });
  const timeline: PlanTimeline = {
    step_s: 10,
    cells: [cell("F", 0, 1), cell("B", 3, 5)],
    transfers: [],
    updates: [{ stage: 0, member: 0, start_s: 8, stop_s: 10 }],
    cell_count: 2,
    problem: null,
  };
  const rows = rowsOf(plan, timeline);
  expect(rows.map(({ name, forward_s, backward_s, waiting_s }) => [name, forward_s, backward_s, waiting_s])).toEqual([
    ["ash", 1, 2, 5],
  ]);
  expect(bubbleOf(rows, 10)).toBe(0.5);
});

test("ticks are round", () => {
  expect(ticksOf(10)).toEqual([0, 2, 4, 6, 8, 10]);
  expect(ticksOf(0.034)).toHaveLength(4);
});
