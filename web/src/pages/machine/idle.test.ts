import { expect, test } from "vitest";

import type { Job } from "../../api/types";
import { idleReason } from "./idle";

test("the reason is that of the first running job whose plan leaves the machine out", () => {
  const job = (id: string, ...left: string[]) =>
    ({ id, name: id, plan: { idle: left.map((one) => ({ contributor_id: one, name: one, reason: `${one} is slow` })) } }) as unknown as Job;
  const running = [{ id: "a", name: "a", plan: null }, job("b", "con-2"), job("c", "con-1", "con-2")];
  expect(idleReason("con-2", running)).toEqual({ reason: "con-2 is slow", job: { id: "b", name: "b" } });
  expect(idleReason("con-3", running)).toBeNull();
});
