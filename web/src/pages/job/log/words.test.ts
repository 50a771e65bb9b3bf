import { expect, test } from "vitest";

import { eventOf } from "../../../api/events/fixture";
import { wordsFor } from "./words";

test("a sample shows the prompt and what follows", () => {
  expect(wordsFor(eventOf("sampled", { step: 20, prompt: "The License", text: " and the" }))).toBe(
    "Sample at step 20: “The License” continues “ and the”.",
  );
});

test("an epoch says who came and went, and what it cost", () => {
  const reformed = (recomputed: number) => wordsFor(eventOf("reformed", { sentence: "ada was lost", seconds: 0.8, recomputed }));
  expect(reformed(0)).toBe("ada was lost; no step for 800.0 ms.");
  expect(reformed(1)).toBe("ada was lost; no step for 800.0 ms, 1 microbatch computed again.");
  expect(reformed(3)).toBe("ada was lost; no step for 800.0 ms, 3 microbatches computed again.");
});
