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
  expect(python).toContain("print(choice.text");
  expect(snippet("curl", "base", "http://h:1", "completions")).toContain("http://h:1/v1/completions");
});

test("a request with quotes and settings is printed for a shell and for Python", () => {
  const request = { model: "poet", messages: [{ role: "user", content: "It's \"so\" $HOME\n说" }], top_k: 20, temperature: 0, echo: false };
  const shell = snippet("curl", "poet", "http://h:1", "chat/completions", request);
  expect(shell).toContain(`It'\\''s \\"so\\" $HOME\\n说`);
  const python = snippet("python", "poet", "http://h:1", "chat/completions", request);
  expect(python).toContain(`messages=[{"role": "user", "content": "It's \\"so\\" $HOME\\n说"}],`);
  expect(python).toContain('extra_body={"top_k": 20, "echo": False},');
  expect(python).toContain("temperature=0,");
});
