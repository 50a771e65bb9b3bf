import { expect, test } from "vitest";

import { routeOf, snippet } from "./snippet";

test("a program asks by the route that its model answers", () => {
  const chat = { kind: "generate", has_chat_template: true } as const;
  expect(routeOf(undefined)).toBe("chat/completions");
  expect(routeOf(chat)).toBe("chat/completions");
  expect(routeOf({ ...chat, has_chat_template: false })).toBe("completions");
  expect(routeOf({ kind: "embed", has_chat_template: false })).toBe("embeddings");
});

test("a model without a chat template is given a text to go on with", () => {
  const python = snippet("python", "base", "http://h:1", "completions");
  expect(python).toContain("client.completions.create(");
  expect(python).toContain("chunk.choices[0].text");
  expect(snippet("curl", "base", "http://h:1", "completions")).toContain("http://h:1/v1/completions");
});
