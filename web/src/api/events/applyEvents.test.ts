import { QueryClient } from "@tanstack/react-query";
import { afterEach, expect, test, vi } from "vitest";

vi.hoisted(() => vi.stubGlobal("location", { origin: "http://here" }));

import { catalogue, comparison } from "../queries";
import type { Metric } from "../types";
import { applyEvents, mergeLog, mergeMetrics } from "./applyEvents";
import { eventOf } from "./fixture";

afterEach(() => vi.unstubAllGlobals());

const metric = (split: Metric["split"], step: number, loss: number): Metric => ({ split, step, data: { loss } });

test("steps and validations join the metrics in order", () => {
  const merged = mergeMetrics(
    [metric("train", 1, 3)],
    [eventOf("step", { step: 2, loss: 2 }, 2), eventOf("validated", { split: "validation", step: 2, loss: 2.5 }, 3)],
  );
  expect(merged).toEqual([metric("train", 1, 3), metric("train", 2, 2), metric("validation", 2, 2.5)]);
});

test("a step that a resumed attempt repeats replaces the first one", () => {
  const merged = mergeMetrics([metric("train", 1, 3), metric("train", 2, 2)], [eventOf("step", { step: 1, loss: 2.9 }, 9)]);
  expect(merged).toEqual([metric("train", 1, 2.9), metric("train", 2, 2)]);
});

test("metrics that no event concerns stay the same object, so that nothing is drawn again", () => {
  const known = [metric("train", 1, 3)];
  expect(mergeMetrics(known, [eventOf("note", { message: "hello" }, 2)])).toBe(known);
});

test("the log leaves out steps and what it has already", () => {
  const known = [eventOf("note", { message: "old" }, 5)];
  const fresh = eventOf("note", { message: "new" }, 7);
  expect(mergeLog(known, [eventOf("note", { message: "old" }, 5), eventOf("step", {}, 6), fresh])).toEqual([known[0], fresh]);
});

test("the comparison of jobs and the catalogue of models are fetched again after events that change them", async () => {
  const isStale = async (kind: string) => {
    const client = new QueryClient();
    client.setQueryData(comparison(["job-1"]).queryKey, { jobs: [] } as never);
    client.setQueryData(catalogue.queryKey, { models: [], notes: [] } as never);
    applyEvents(client, [eventOf(kind, { step: 1 }, 1)]);
    await Promise.resolve();
    await Promise.resolve();
    return [comparison(["job-1"]), catalogue].map(({ queryKey }) => client.getQueryState(queryKey)!.isInvalidated);
  };
  expect(await isStale("step")).toEqual([true, false]);
  expect(await isStale("artifact")).toEqual([false, true]);
  expect(await isStale("state")).toEqual([true, true]);
  expect(await isStale("note")).toEqual([false, false]);
});
