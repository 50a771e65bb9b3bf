import { afterEach, expect, test, vi } from "vitest";

import { keep, kept } from "./kept";

afterEach(() => vi.unstubAllGlobals());

test("a choice holds although the storage is full", () => {
  const stored = new Map<string, string>();
  let isFull = true;
  vi.stubGlobal("localStorage", {
    getItem: (name: string) => stored.get(name) ?? null,
    setItem: (name: string, text: string) => {
      if (isFull) throw new DOMException("full", "QuotaExceededError");
      stored.set(name, text);
    },
  });
  keep("a", "1");
  expect([kept("a"), stored.size]).toEqual(["1", 0]);
  isFull = false;
  keep("a", "2");
  expect([kept("a"), stored.get("a")]).toEqual(["2", "2"]);
});
