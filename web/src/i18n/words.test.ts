import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";

import { expect, test } from "vitest";

import en from "./en.json";
import chinese from "./zh";

const sources = readdirSync(join(__dirname, ".."), { recursive: true, encoding: "utf-8" })
  .filter((name) => /\.tsx?$/.test(name) && !name.includes(".test."))
  .map((name) => readFileSync(join(__dirname, "..", name), "utf-8"));

/** First arguments of `t("...")` and values of `i18nKey="..."`. */
const used = new Set(
  sources.flatMap((text) =>
    [...text.matchAll(/\bt\(\s*"((?:[^"\\]|\\.)*)"|i18nKey="([^"]*)"/g)].map((found) => found[1] ?? found[2]!),
  ),
);
const known = new Set(Object.keys(chinese).map((key) => key.replace(/_other$/, "")));

test("every word has its Chinese", () => {
  expect([...used].filter((word) => !known.has(word))).toEqual([]);
});

test("no translation is left over", () => {
  const all = sources.join("\n");
  expect([...known].filter((word) => !used.has(word) && !all.includes(JSON.stringify(word)))).toEqual([]);
});

test("every word is translated in one place", () => {
  const folder = join(__dirname, "zh");
  const parts = readdirSync(folder).filter((name) => name.endsWith(".json"));
  const words = parts.flatMap((name) => Object.keys(JSON.parse(readFileSync(join(folder, name), "utf-8")) as object));
  expect(words.filter((word, place) => words.indexOf(word) !== place)).toEqual([]);
});

test("English has the plurals of what is counted", () => {
  const counted = [...used].filter((word) => word.includes("{{count}}"));
  expect(counted.filter((word) => !(`${word}_one` in en && `${word}_other` in en))).toEqual([]);
});

test("translations keep what is filled in", () => {
  const slots = (text: string) => [...text.matchAll(/\{\{\w+/g)].map(String).sort();
  const wrong = Object.entries(chinese).filter(([key, text]) => slots(key).join() !== slots(text).join());
  expect(wrong).toEqual([]);
});

test("values have spaces beside Chinese characters on both sides or on none", () => {
  const wrong = /[\u3400-\u9fff]\{\{\w+\}\} [\u3400-\u9fff]|[\u3400-\u9fff] \{\{\w+\}\}[\u3400-\u9fff]/;
  expect(Object.values(chinese).filter((text) => wrong.test(text))).toEqual([]);
});
