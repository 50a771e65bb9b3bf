import { expect, test } from "vitest";

import { configOf, parametersOf, sizeOf, SIZES } from "./modelSizes";

test("a configuration is recognized by its shape, whatever its vocabulary", () => {
  for (const size of SIZES) expect(sizeOf(configOf(size, { vocab_size: 512 }))).toBe(size);
  expect(sizeOf({ ...configOf("tiny"), num_hidden_layers: 7 })).toBeNull();
  expect(sizeOf({ model_type: "gpt2" })).toBeNull();
});

test("another size keeps the vocabulary and the length", () => {
  expect(configOf("small", { vocab_size: 512, max_position_embeddings: 64, hidden_size: 1 })).toMatchObject({
    vocab_size: 512,
    max_position_embeddings: 64,
    hidden_size: 512,
  });
});

test("sizes have the parameters that the page names", () => {
  expect(SIZES.map((size) => Math.round(parametersOf(size) / 1e5) / 10)).toEqual([2.8, 24.3, 77.1]);
});
