import { expect, test } from "vitest";

import { exported, SavedConversations } from "./saved";
import type { Answer, Turn } from "./types";

class Memory {
  readonly kept = new Map<string, string>();
  constructor(private readonly most = Infinity) {}
  getItem = (key: string) => this.kept.get(key) ?? null;
  setItem = (key: string, text: string) => {
    if (text.length > this.most) throw new DOMException("full", "QuotaExceededError");
    this.kept.set(key, text);
  };
  removeItem = (key: string) => void this.kept.delete(key);
}

const settings = { system: "", stop: [] };
const turn = (prompt: string, text = "yes"): Turn => ({
  id: prompt,
  prompt,
  answers: [{ model: "poet", text, state: "done", settings, seed: 1 } as unknown as Answer],
});

test("the last changed conversation is the first, and keeps its title", () => {
  const saved = new SavedConversations(new Memory(), () => "key-a");
  saved.put("a", [turn("  What is\nthe sea? ")], settings, 1);
  saved.put("b", [turn("x".repeat(100))], settings, 2);
  expect(saved.list().map((one) => [one.id, one.title.length])).toEqual([["b", 60], ["a", 16]]);
  saved.rename("a", " The sea ");
  saved.rename("b", "  ");
  saved.put("a", [turn("What is the sea?"), turn("And the wind?")], settings, 3);
  expect(saved.list().map((one) => one.title)[0]).toBe("The sea");
  saved.remove("b");
  expect(saved.list().map((one) => one.id)).toEqual(["a"]);
});

test("each key has a list of its own, and a damaged one is empty", () => {
  const memory = new Memory();
  let owner = "key-a";
  const saved = new SavedConversations(memory, () => owner);
  saved.put("a", [turn("hello")], settings, 1);
  owner = "key-b";
  expect(saved.list()).toEqual([]);
  owner = "key-a";
  expect(saved.list()).toHaveLength(1);
  for (const text of ["{", "3", '[{"id": 1}]']) {
    memory.kept.set("share-compute.conversations.key-a", text);
    saved.changed();
    expect(saved.list()).toEqual([]);
  }
});

test("the oldest are dropped when there are too many, or too little space", () => {
  const saved = new SavedConversations(new Memory(), () => "key");
  for (let number = 0; number < 60; number += 1) saved.put(String(number), [turn("hello")], settings, number);
  expect(saved.list().map((one) => one.id)).toEqual(Array.from({ length: 50 }, (_, place) => String(59 - place)));
  const small = new SavedConversations(new Memory(600), () => "key");
  for (const id of ["a", "b", "c", "d"]) expect(small.put(id, [turn("hello")], settings, 1)).toBe(true);
  expect(small.list().at(0)?.id).toBe("d");
  expect(small.list().length).toBeLessThan(4);
  const before = small.list();
  expect(small.put("e", [turn("hello", "y".repeat(700))], settings, 1)).toBe(false);
  expect([small.list(), small.unsaved()]).toEqual([before, "e"]);
  expect(small.put("f", [turn("hello")], settings, 1)).toBe(true);
  expect(small.unsaved()).toBe("");
});

test("nothing is kept without a key", () => {
  const memory = new Memory();
  const saved = new SavedConversations(memory, () => "");
  expect(saved.put("a", [turn("hello")], settings, 1)).toBe(false);
  expect([saved.list(), memory.kept.size, saved.unsaved()]).toEqual([[], 0, ""]);
});

test("a conversation that another tab deleted does not come back, and other tabs' ones stay", () => {
  const memory = new Memory();
  const [here, there] = [new SavedConversations(memory, () => "key"), new SavedConversations(memory, () => "key")];
  here.put("a", [turn("hello")], settings, 1);
  there.put("b", [turn("hello")], settings, 2);
  there.remove("a");
  expect(here.isDeleted("a")).toBe(true);
  expect(here.put("a", [turn("hello")], settings, 3)).toBe(false);
  expect(here.put("c", [turn("hello")], settings, 4)).toBe(true);
  expect(here.list().map((one) => one.id)).toEqual(["c", "b"]);
});

test("the list is read once until it changes", () => {
  const memory = new Memory();
  let reads = 0;
  const counted = { ...memory, getItem: (key: string) => ((reads += 1), memory.getItem(key)) };
  const saved = new SavedConversations(counted, () => "key");
  const first = saved.list();
  expect([saved.list() === first, reads]).toEqual([true, 1]);
  saved.changed();
  expect([saved.list() === first, reads]).toEqual([true, 2]);
});

test("an export has the messages of each model", () => {
  const text = exported({ id: "a", title: "T", at: 0, turns: [turn("hello")], settings: { ...settings, system: "Be brief." } });
  expect(JSON.parse(text)).toMatchObject({
    title: "T",
    changed_at: "1970-01-01T00:00:00.000Z",
    conversations: [
      {
        model: "poet",
        messages: [
          { role: "system", content: "Be brief." },
          { role: "user", content: "hello" },
          { role: "assistant", content: "yes" },
        ],
      },
    ],
  });
});
