import { expect, test } from "vitest";

import type { Job } from "../../api/types";
import { speedUnit, tokensPerStep } from "./eta";

const job = (synchronization: object, data: object = {}) =>
  ({ spec: { kind: "train", training: { batch_size: 16, sequence_length: 8, synchronization }, data } }) as unknown as Job;

test("a step has the batches of all branches", () => {
  expect(tokensPerStep(job({ kind: "allreduce" }))).toBe(128);
  expect(tokensPerStep(job({ kind: "local", branches: 4 }))).toBe(512);
  expect(tokensPerStep(job({ kind: "local", branches: 4 }, { dataset: "digits" }))).toBe(64);
});

test("only language models have a speed in tokens", () => {
  expect(speedUnit(job({ kind: "allreduce" }, { dataset: null, table: null }))).toBe("tok/s");
  for (const part of ["dataset", "table", "images", "labels", "pairs"]) {
    const other = job({ kind: "allreduce" }, { [part]: {} });
    expect([speedUnit(other), tokensPerStep(other)]).toEqual(["samples/s", 16]);
  }
});
