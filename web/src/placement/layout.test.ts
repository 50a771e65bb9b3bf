import { expect, test } from "vitest";

import type { Plan } from "../api/types";
import { blocksOf, changes, joined, layerRange, namesOf, pictureHeight, planOfBranch, ranges, stageShares } from "./layout";

const stage = (start: number, stop: number) => ({ start, stop, parameters: 1, members: [], boundary_codec: "none" as const, sum_codec: "none" });

const member = (name: string, microbatches: number, memory_bytes = 1) => ({
  contributor_id: name,
  name,
  microbatches: Array.from({ length: microbatches }, (_, id) => id),
  memory_bytes,
  reason: "",
  standing: "",
});

function plan(...stages: ReturnType<typeof member>[][]): Plan {
  return {
    epoch: 0,
    model_id: "model",
    strategy: "auto",
    num_layers: stages.length,
    parameters: 1,
    microbatches: 4,
    idle: [],
    branches: [],
    prediction: null,
    stages: stages.map((members, start) => ({ ...stage(start, start + 1), members })),
  };
}

test("stages take their share of the bar", () => {
  expect(stageShares({ num_layers: 4, stages: [stage(0, 1), stage(1, 4)] })).toEqual([0.25, 0.75]);
});

test("a small stage beside a large one is still seen, and the bar stays whole", () => {
  const shares = stageShares({ num_layers: 1000, stages: [stage(0, 1), stage(1, 1000)] });
  expect(shares[0]).toBeGreaterThan(0.038);
  expect(shares.reduce((sum, share) => sum + share)).toBeCloseTo(1);
});

test("forty stages differ by their layers, too", () => {
  const stages = Array.from({ length: 40 }, (_, index) => stage(index * 5, index === 39 ? 210 : index * 5 + 5));
  const shares = stageShares({ num_layers: 210, stages });
  expect(shares[39]! / shares[0]!).toBeCloseTo(15 / 5);
});

test("the bar can be cut by memory", () => {
  expect(stageShares(plan([member("ash", 4, 300)], [member("birch", 4, 100)]), "memory")).toEqual([0.75, 0.25]);
});

test("members of a stage lie above each other, as high as their share of the microbatches", () => {
  const blocks = blocksOf(plan([member("ash", 3), member("birch", 1)], [member("cedar", 4)]), "layers", 100);
  expect(blocks.map(({ name, left, top, height }) => [name, left, top, height])).toEqual([
    ["ash", 0, 0, 75],
    ["birch", 0, 75, 25],
    ["cedar", 0.5, 0, 100],
  ]);
});

test("a member that computes nothing for now can still be pointed at", () => {
  const [, idle] = blocksOf(plan([member("ash", 4), member("birch", 0)]), "layers", 100);
  expect(idle!.height).toBeGreaterThan(10);
});

test("many machines do not make an endless picture", () => {
  expect(pictureHeight(plan(Array.from({ length: 40 }, (_, index) => member(`m${index}`, 1))))).toBe(440);
});

test("who is gone and who has come", () => {
  const before = blocksOf(plan([member("ash", 4)], [member("birch", 4)]), "layers", 100);
  const after = blocksOf(plan([member("cedar", 4)], [member("ash", 4)]), "layers", 100);
  const { gone, come } = changes(before, after);
  expect(gone.map((block) => block.name)).toEqual(["birch"]);
  expect([...come]).toEqual(["cedar"]);
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

test("the plan of a branch has its stages and its step time", () => {
  const whole = { ...plan([member("ash", 4)]), prediction: { step_s: 1, samples_per_s: 9 } } as Plan;
  const branch = { number: 1, stages: plan([member("birch", 4)], [member("cedar", 4)]).stages, step_s: 2 };
  const found = planOfBranch(whole, branch);
  expect(namesOf(found.stages)).toEqual(["birch", "cedar"]);
  expect([found.prediction?.step_s, found.num_layers]).toEqual([2, 1]);
  expect(planOfBranch(whole, { ...branch, step_s: null }).prediction).toBeNull();
});
