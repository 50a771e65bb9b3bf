import { expect, test } from "vitest";

import { differences } from "./versions";

const server = { python: "3.11.7", ray: "2.60.0", torch: "2.13.0", share_compute: "0.2.0" };

test("a machine like the server differs in nothing, whatever its build of torch", () => {
  expect(differences({ ...server, torch: "2.13.0+cu130" }, server)).toEqual([]);
});

test("what differs is named with both versions, and what a machine did not say differs", () => {
  const { ray: _, ...given } = { ...server, torch: "2.13.1" };
  expect(differences(given, server)).toEqual([
    { name: "Ray", given: undefined, wanted: "2.60.0" },
    { name: "torch", given: "2.13.1", wanted: "2.13.0" },
  ]);
});
