import { expect, test } from "vitest";

import { caughtUp, commonLength } from "./catchUp";
import { arrived, cut, lengthAt, markOf, pinned, settled, type Arrivals } from "./marks";
import { chatRequest, plainRequest } from "./requests";
import type { Answer, Turn } from "./types";

const answer = (model: string, text: string): Answer => ({
  model,
  text,
  seed: 1,
  settings: { system: "", stop: [] },
  state: "done",
  marks: [],
  isPlain: false,
  wait: "",
  isReconnecting: false,
  finish: "stop",
  firstTokenS: 0.1,
  writingS: 1,
  tokens: 3,
  isCounted: true,
  problem: null,
});
const before: Turn[] = [
  { id: "1", prompt: "first", answers: [answer("poet", "one"), answer("clerk", "")] },
  { id: "2", prompt: "second", answers: [answer("clerk", "two")] },
];
const settings = { system: "", stop: [] };

test("each model is told what it said itself, and users and assistants take turns", () => {
  const contents = (model: string) => chatRequest(model, before, "third", settings, 7).messages.map((one) => one.content);
  expect(contents("poet")).toEqual(["first", "one", "third"]);
  expect(contents("clerk")).toEqual(["second", "two", "third"]);
});

test("only what was set is sent", () => {
  const plain = chatRequest("poet", [], "hello", settings, 7);
  expect(Object.keys(plain)).toEqual(["model", "messages", "seed"]);
  const full = chatRequest("poet", [], "hello", { system: "Be brief.", temperature: 0, stop: ["END"], seed: 3 }, 3);
  expect(full).toMatchObject({ temperature: 0, stop: ["END"], seed: 3, messages: [{ role: "system" }, { role: "user" }] });
  expect("system" in full).toBe(false);
});

test("plain text leaves room for its prompt", () => {
  expect(plainRequest("base", before, "third", settings, 7, 100)).toMatchObject({ prompt: "third", max_tokens: 50 });
  expect(plainRequest("poet", before, "third", { ...settings, max_tokens: 9 }, 7, 4096)).toMatchObject({
    prompt: "first\none\nthird",
    max_tokens: 9,
  });
});

test("a text that comes again stays while it is the same", () => {
  expect(caughtUp("the sea is", "the s")).toBe("the sea is");
  expect(caughtUp("the sea is", "the sea is wide")).toBe("the sea is wide");
  expect(caughtUp("the sea is", "the wind")).toBe("the wind");
  expect(commonLength("the sea", "the wind")).toBe(4);
});

const loss = { replica: 0, of: 1, number: 1, reason: "lost birch", machines: ["birch"], ago_s: 0.4 };

test("a loss stands where the text was when others could go on", () => {
  let arrivals: Arrivals = { points: [] };
  for (const [at, length] of [[1000, 5], [1100, 9], [1900, 12]] as const) arrivals = arrived(arrivals, at, length);
  expect(lengthAt(arrivals, 1500, 12)).toBe(9);
  expect(lengthAt(arrivals, 900, 12)).toBe(0);
  expect(lengthAt(arrivals, 3000, 12)).toBe(12);
  const mark = markOf(loss, arrivals, 1200)!;
  // Tokens that were sampled before the loss still arrive, and are placed before the mark.
  expect(cut("x".repeat(12), [mark]).map((one) => one.piece.length)).toEqual([12, 0]);
  const went = { replica: 0, number: 1, ago_s: 0.9, seconds: 0.6 };
  expect(settled([mark], went, "x".repeat(12), arrivals, 1950)).toMatchObject([{ at: 9, seconds: 0.6 }]);
  expect(pinned({ marks: [mark], text: "x".repeat(12) })).toMatchObject([{ at: 12, seconds: null }]);
});

test("a text that another replica writes is not marked", () => {
  const arrivals = { points: [[1000, 5], [1800, 9]] as [number, number][] };
  expect(markOf({ ...loss, of: 2, ago_s: 0.8 }, arrivals, 1900)).toBeNull();
  expect(markOf({ ...loss, of: 2, ago_s: 0.1 }, arrivals, 1900)).not.toBeNull();
});

test("a text is cut at its marks", () => {
  const mark = { key: "0:1", at: 3, machines: ["birch"], reason: "", seconds: null };
  expect(cut("abcdef", []).map((one) => one.piece)).toEqual(["abcdef"]);
  expect(cut("abcdef", [mark])).toEqual([
    { before: [], piece: "abc" },
    { before: [mark], piece: "def" },
  ]);
  const [only, ...none] = cut("", [{ ...mark, at: 0 }]);
  expect([only?.before.length, only?.piece, none.length]).toEqual([1, "", 0]);
  expect(cut("abc", [mark]).map((one) => [one.before.length, one.piece])).toEqual([
    [0, "abc"],
    [1, ""],
  ]);
});
