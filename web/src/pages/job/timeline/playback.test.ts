import { expect, test } from "vitest";

import { momentsOf, placeOf, playedSeconds } from "./playback";
import type { Row } from "./timeline";

const row = (stage: number, member: number, cells: ["F" | "B", number, number, number][], update?: [number, number]) =>
  ({
    stage,
    member,
    name: `${stage}.${member}`,
    cells: cells.map(([kind, microbatch, start_s, stop_s]) => ({ stage, member, kind, microbatch, start_s, stop_s })),
    update: update && { stage, member, start_s: update[0], stop_s: update[1] },
  }) as unknown as Row;

test("each stage has a phase at each moment", () => {
  const rows = [
    row(0, 0, [["F", 0, 0, 1], ["B", 0, 4, 6]], [6, 7]),
    row(0, 1, [["F", 1, 0, 1], ["B", 1, 4, 6]], [6, 7]),
    row(1, 0, [["F", 0, 1, 2], ["B", 0, 2, 4]], [4, 5]),
  ];
  const moments = momentsOf(rows);
  expect(moments.map(({ at, stages }) => [at, ...stages.map(({ phase, microbatches }) => phase + microbatches.join())])).toEqual([
    [0, "F0,1", "waiting"],
    [1, "waiting", "F0"],
    [2, "waiting", "B0"],
    [4, "B0,1", "update"],
    [5, "B0,1", "waiting"],
    [6, "update", "waiting"],
    [7, "waiting", "waiting"],
  ]);
  expect([0, 1.5, 4, 9].map((at) => placeOf(moments, at))).toEqual([0, 1, 3, 6]);
});

test("a short step is slowed down, and a long one is not", () => {
  expect([playedSeconds(0.2), playedSeconds(60)]).toEqual([6, 60]);
});
