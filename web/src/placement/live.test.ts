import { expect, test } from "vitest";

import type { ClusterEvent, Measured } from "../api/types";
import { workOf } from "./live";

const event = (kind: string, second: number, data: object = {}) =>
  ({ kind, at: `2026-11-29T12:00:${String(second).padStart(2, "0")}Z`, data }) as unknown as ClusterEvent;
const traffic = (second: number, machines: Record<string, [number, number]>) =>
  event("traffic", second, {
    machines: Object.fromEntries(Object.entries(machines).map(([id, [sent_bytes, received_bytes]]) => [id, { sent_bytes, received_bytes }])),
  });

test("computing is measured as a share of the step", () => {
  const measured = { measured_step_s: 0.2, machines: { ash: 0.05, birch: 0.3 } } as unknown as Measured;
  const work = workOf(measured, []);
  expect(work.get("ash")).toEqual({ computing: 0.25, sentBytesPerS: null, receivedBytesPerS: null });
  expect(work.get("birch")?.computing).toBe(1);
  expect(workOf(null, []).size).toBe(0);
});

test("traffic is a rate over the time since the report before, or since the start of the attempt", () => {
  const first = [event("started", 0), traffic(10, { ash: [1000, 500] })];
  expect(workOf(null, first).get("ash")).toMatchObject({ sentBytesPerS: 100, receivedBytesPerS: 50 });
  const second = [...first, traffic(20, { birch: [400, 0] }), traffic(30, { ash: [4000, 0] })];
  expect(workOf(null, second).get("ash")).toMatchObject({ sentBytesPerS: 200, receivedBytesPerS: 0 });
  expect(workOf(null, second).get("birch")).toMatchObject({ sentBytesPerS: 20 });
  expect(workOf(null, [traffic(10, { ash: [1000, 500] })]).size).toBe(0);
  const resumed = [...first, event("started", 40), traffic(50, { ash: [100, 100] })];
  expect(workOf(null, resumed).get("ash")).toMatchObject({ sentBytesPerS: 10 });
});
