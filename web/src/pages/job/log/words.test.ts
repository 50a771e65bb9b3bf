import { expect, test } from "vitest";

import type { ClusterEvent } from "../../../api/types";
import { wordsFor } from "./words";

const event = (kind: string, data: Record<string, unknown>): ClusterEvent => ({
  seq: 1,
  kind,
  data,
  job_id: "job-1",
  contributor_id: null,
  attempt: 1,
  at: "2026-01-31T12:00:00Z",
});

test("a sample shows the prompt and what follows", () => {
  expect(wordsFor(event("sampled", { step: 20, prompt: "The License", text: " and the" }))).toBe(
    "Sample at step 20: “The License” continues “ and the”.",
  );
});

test("an epoch says who came and went, and what it cost", () => {
  const reformed = (recomputed: number) => wordsFor(event("reformed", { sentence: "ada was lost", seconds: 0.8, recomputed }));
  expect(reformed(0)).toBe("ada was lost; no step for 800.0 ms.");
  expect(reformed(1)).toBe("ada was lost; no step for 800.0 ms, 1 microbatch computed again.");
  expect(reformed(3)).toBe("ada was lost; no step for 800.0 ms, 3 microbatches computed again.");
});
