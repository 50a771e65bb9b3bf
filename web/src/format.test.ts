import i18next from "i18next";
import { expect, test } from "vitest";

import { sentence } from "./components/Feedback";
import { ago, bytes, count, duration, latency, si, significant, stepTime } from "./format";
import chinese from "./i18n/zh";

test("bytes are in binary units", () => {
  expect(bytes(0)).toBe("0 B");
  expect(bytes(1536)).toBe("1.5 KiB");
  expect(bytes(4 * 2 ** 30)).toBe("4.0 GiB");
  expect(bytes(180 * 2 ** 20)).toBe("180 MiB");
});

test("speeds are in decimal units", () => {
  expect(si(51e9, "FLOP/s")).toBe("51.0 GFLOP/s");
  expect(si(640, "tok/s")).toBe("640 tok/s");
});

test("whole parts of numbers are whole", () => {
  expect([0.000123456, 12.3456, 51234.7, -123456.7, 1e20].map((value) => significant(value, 4))).toEqual(["0.0001235", "12.35", "51235", "-123457", "1.000e+20"]);
});

test("sentences begin with a capital letter, and names stay as they are", () => {
  expect(["no machine is free", "model.config is wrong", "share-compute up starts it", "/data/a.csv is empty", "data file a.csv"].map(sentence)).toEqual([
    "No machine is free.",
    "model.config is wrong.",
    "share-compute up starts it.",
    "/data/a.csv is empty.",
    "Data file a.csv.",
  ]);
});

test("names of machines are never capitalized, whatever follows them", () => {
  const names = ["doug", "server", "laptop", "node", "worker", "constructor", "ash-2", "node.cuda0"];
  const ends = ["holds layers 0-3", "is left out: it lacks memory", "computes most of a token", "was lost", "does not answer"];
  const texts = names.flatMap((name) => ends.map((end) => `${name} ${end}.`));
  expect(texts.map(sentence)).toEqual(texts);
  expect(sentence("a message between ash and birch takes 3.0 ms")).toBe("A message between ash and birch takes 3.0 ms.");
  expect(sentence("worker 3 sent a message, but the job has 2")).toBe("Worker 3 sent a message, but the job has 2.");
  expect(["running", "running: all machines hold their shards"].map(sentence)).toEqual(["Running.", "Running: all machines hold their shards."]);
});

test("durations show the two largest units", () => {
  expect(duration(0.35)).toBe("0.35 s");
  expect(duration(59.7)).toBe("1 min 0 s");
  expect(duration(3600 + 240)).toBe("1 h 4 min");
  expect(duration(90_000)).toBe("1 d 1 h");
});

test("times of steps have no exponents", () => {
  expect(stepTime(0.9996)).toBe("999.6 ms");
  expect(stepTime(0.99996)).toBe("1.00 s");
  expect(stepTime(18e-6)).toBe("18 us");
  expect(stepTime(0.0009999)).toBe("1.0 ms");
  expect(stepTime(1.314)).toBe("1.31 s");
  expect(stepTime(119.9)).toBe("119.90 s");
  expect(stepTime(156)).toBe("2.6 min");
  expect(stepTime(5 * 3600)).toBe("5.0 h");
  expect(stepTime(1e12)).toBe("31,688.1 years");
});

test("latencies share one unit", () => {
  expect(latency(0.00023)).toBe("0.23 ms");
  expect(latency(0.12)).toBe("120 ms");
});

test("moments are told from now", () => {
  const now = Date.parse("2026-01-31T12:00:00Z");
  expect(ago("2026-01-31T11:59:59Z", now)).toBe("just now");
  expect(ago("2026-01-31T11:58:00Z", now)).toBe("2 min ago");
});

test("Chinese has its own units", async () => {
  await i18next.init({ lng: "zh", keySeparator: false, nsSeparator: false, resources: { zh: { translation: chinese } } });
  const now = Date.parse("2026-01-31T12:00:00Z");
  expect(ago("2026-01-31T11:59:48Z", now)).toBe("12 秒前");
  expect(ago("2026-01-31T12:00:00Z", now)).toBe("刚刚");
  expect(duration(3600 + 240)).toBe("1 小时 4 分钟");
  expect(stepTime(156)).toBe("2.6 分钟");
  expect(count(12_345)).toBe("12,345");
});
