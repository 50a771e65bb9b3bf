import { afterEach, expect, test, vi } from "vitest";

import { keep, keepInTab, kept, keptInTab } from "./kept";

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

test("choices hold although the browser refuses storage", () => {
  const refuse = () => {
    throw new DOMException("denied", "SecurityError");
  };
  vi.stubGlobal("localStorage", { getItem: refuse, setItem: refuse });
  vi.stubGlobal("sessionStorage", { getItem: refuse, setItem: refuse });
  expect([kept("b"), keptInTab("b")]).toEqual([null, null]);
  keep("b", "1");
  keepInTab("b", "2");
  expect([kept("b"), keptInTab("b")]).toEqual(["1", "2"]);
});
