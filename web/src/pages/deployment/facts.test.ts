import { expect, test } from "vitest";

import { modelOf, nameFrom, range, replicasOf } from "./facts";

test("a name is made of the folder's", () => {
  expect(nameFrom("/srv/models/Tiny Llama (2)/")).toBe("Tiny-Llama-2");
  expect(nameFrom("C:\\models\\poet")).toBe("poet");
  expect(nameFrom("…")).toBe("");
});

test("a model is called by its folder, by its name on the Hub, or by its job", () => {
  const nowhere = { path: null, hub: null, revision: null, job: null, artifact: "model" };
  expect(modelOf({ model: { ...nowhere, path: "/srv/poet/" } })).toEqual({ short: "poet", full: "/srv/poet/" });
  const fetched = { ...nowhere, path: "/data/uploads/up-1/files", hub: "org/tiny", revision: "4f2c" };
  expect(modelOf({ model: fetched })).toEqual({ short: "org/tiny", full: "org/tiny@4f2c" });
  expect(modelOf({ model: { ...nowhere, job: "job-1", artifact: "best" } }).short).toBe("job-1/best");
});

test("replicas are written as the command line takes them", () => {
  expect(range({ min: 2, max: 2 })).toBe("2");
  expect(range({ min: 0, max: 4 })).toBe("0..4");
  const spec = { replicas: { min: 0, max: 4 } } as Parameters<typeof replicasOf>[0]["spec"];
  expect(replicasOf({ replicas: null, spec })).toBe("0..4");
  expect(replicasOf({ replicas: { ready: 1, wanted: 1, draining: 0, waiting: 0, standby: 0, reason: "" }, spec })).toBe("1/0..4");
});
