import { expect, test } from "vitest";

import type { MachineSummary, MachineUtilization } from "../../api/types";
import { busiest, meanOf } from "./busiest";

test("of many machines those with the highest mean are drawn", () => {
  const machines = ["ash", "elm", "oak"].map((id) => ({ id }) as MachineSummary);
  const used = { elm: { busy: [null, 0.2, 0.4] }, oak: { busy: [0.9, null, null] } } as unknown as Record<string, MachineUtilization>;
  expect(busiest(machines, used, 3)).toBe(machines);
  expect(busiest(machines, used, 2).map(({ id }) => id)).toEqual(["oak", "elm"]);
  expect([meanOf([null]), meanOf([0.2, 0.4])]).toEqual([null, 0.30000000000000004]);
});
