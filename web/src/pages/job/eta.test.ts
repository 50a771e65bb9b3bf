import { expect, test } from "vitest";

import type { Job } from "../../api/types";
import { tokensPerStep } from "./eta";

const job = (synchronization: object, dataset: string | null = null) =>
  ({ spec: { kind: "train", training: { batch_size: 16, sequence_length: 8, synchronization }, data: { dataset } } }) as unknown as Job;

test("a step has the batches of all branches", () => {
  expect(tokensPerStep(job({ kind: "allreduce" }))).toBe(128);
  expect(tokensPerStep(job({ kind: "local", branches: 4 }))).toBe(512);
  expect(tokensPerStep(job({ kind: "local", branches: 4 }, "digits"))).toBe(64);
});
