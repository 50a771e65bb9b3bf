import { expect, test } from "vitest";

import { ApiProblem } from "../../api/problem";
import type { CatalogueEntry, Held, PlanReport } from "../../api/types";
import { fitOf, found, freeName, isInfeasible, isUnderWay, machinesKey, parameters, planRequest } from "./entries";
import { modelsSearch } from "./search";

const entry = (name: string, more: Partial<CatalogueEntry> = {}): CatalogueEntry => ({
  id: name,
  name,
  source: "folder",
  model: { path: `/srv/${name}`, hub: null, revision: null, job: null, artifact: "model" },
  reference: `/srv/${name}`,
  description: null,
  licence: null,
  changed_at: null,
  facts: null,
  is_pending: false,
  problem: null,
  hint: null,
  ...more,
});

test("sizes of models are written as published", () => {
  expect([0, 999, 23_456, 999_600, 1_100_048_384, 70_553_706_496, 1.5e12].map(parameters)).toEqual([
    "0", "999", "23 K", "1 M", "1.1 B", "71 B", "1.5 T",
  ]);
});

test("all words are searched in what is shown", () => {
  const all = [entry("TinyLlama", { licence: "apache-2.0" }), entry("poet", { source: "upload", description: "Writes verse" })];
  const names = (text: string, source?: CatalogueEntry["source"]) => found(all, text, source).map((one) => one.name);
  expect(names("")).toEqual(["TinyLlama", "poet"]);
  expect(names("llama APACHE")).toEqual(["TinyLlama"]);
  expect(names("verse llama")).toEqual([]);
  expect(names("", "upload")).toEqual(["poet"]);
});

test("a deployment gets a valid name that is free", () => {
  expect(freeName("org/Tiny Llama!", [])).toBe("Tiny-Llama");
  expect(freeName("poet", ["poet", "poet-2"])).toBe("poet-3");
  expect(freeName("诗人", [])).toBe("model");
  expect(freeName("x".repeat(80), ["x".repeat(80)]).length).toBeLessThanOrEqual(80);
});

test("a plan names the files on the server, or the model on the Hub", () => {
  const model = { path: null, hub: "org/far", revision: null, job: null, artifact: "model" };
  expect(planRequest(entry("poet"))).toMatchObject({ job: { model: { path: "/srv/poet" } }, serving: {} });
  expect(planRequest({ model, reference: null })).toMatchObject({ job: { model: { hub: "org/far" } } });
});

test("machines are counted once", () => {
  const stage = (...ids: string[]) => ({ members: ids.map((contributor_id) => ({ contributor_id })) });
  const report = { serving: { plan: { stages: [stage("a", "b"), stage("a")] }, tokens_per_s: 41.2 } };
  expect(fitOf(report as unknown as PlanReport)).toEqual({ machines: 2, tokensPerS: 41.2 });
  expect(fitOf({ serving: null })).toBeNull();
});

test("the address holds only what the page knows", () => {
  expect(modelsSearch({ show: "over", source: "hub", new: true, job: 3, path: "/x", more: 1 })).toEqual({
    show: "over", source: "hub", new: true, path: "/x",
  });
  expect(modelsSearch({ show: "up", source: "moon" })).toEqual({});
});

test("only a refusal by the planner says that a model does not fit", () => {
  const problem = (code: string) => new ApiProblem(409, { code });
  expect(isInfeasible(problem("plan-infeasible"))).toBe(true);
  expect([problem("fetch-under-way"), new Error("plan-infeasible")].map(isInfeasible)).toEqual([false, false]);
  expect([problem("fetch-under-way"), problem("plan-infeasible")].map(isUnderWay)).toEqual([true, false]);
});

test("a plan is kept while the same machines are ready, and hold the same", () => {
  const [ash, birch] = [{ id: "a", state: "ready", held: null }, { id: "b", state: "ready", held: null }] as const;
  const key = machinesKey([ash, birch]);
  expect(machinesKey([birch, ash, { id: "c", state: "lost", held: null }])).toBe(key);
  expect(machinesKey([ash])).not.toBe(key);
  expect(machinesKey([ash, { ...birch, held: { job_id: "job-1" } as Held }])).not.toBe(key);
});
