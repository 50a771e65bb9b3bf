import { expect, test } from "vitest";

import { locate, syntaxProblems } from "./locate";

const TEXT = `kind: train
model:
  layers:
    - type: linear
    - type: reluu
training:
  optimizer:
    nmae: adam
`;

const lineOf = (field: string, problem = "no") => locate(TEXT, [{ field, problem }])[0]?.line;

test("a problem stands at its field", () => {
  expect(lineOf("kind")).toBe(1);
  expect(lineOf("model.layers.1.type")).toBe(5);
});

test("a missing field stands at its nearest parent", () => {
  expect(lineOf("training.optimizer.learning_rate")).toBe(7);
  expect(lineOf("data")).toBe(1);
});

test("an unknown key is found by its name", () => {
  expect(lineOf("training.optimizer", "unknown key 'nmae'; did you mean 'name'?")).toBe(8);
});

test("broken YAML names its line", () => {
  expect(syntaxProblems("a: 1\nb: [1, 2\nc: 3\n")[0]?.line).toBeGreaterThanOrEqual(2);
  expect(syntaxProblems(TEXT)).toEqual([]);
});
