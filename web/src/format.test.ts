import { expect, test } from "vitest";

import { ago, bytes, duration, latency, si } from "./format";

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

test("durations show the two largest units", () => {
  expect(duration(0.35)).toBe("0.35 s");
  expect(duration(59.7)).toBe("1 min 0 s");
  expect(duration(3600 + 240)).toBe("1 h 4 min");
  expect(duration(90_000)).toBe("1 d 1 h");
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
