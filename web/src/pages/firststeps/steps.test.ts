import { expect, test } from "vitest";

import { after } from "./steps";

const done = (machine: boolean, job = false, model = false) => ({ machine, job, model });

test("the list begins with an empty cluster and ends when all is done", () => {
  expect(after("unknown", done(false))).toBe("begun");
  expect(after("begun", done(true, true))).toBe("begun");
  expect(after("begun", done(true, true, true))).toBe("over");
});

test("a cluster that is in use shows no list, and neither does a dismissed one", () => {
  expect(after("unknown", done(true))).toBe("unknown");
  expect(after("unknown", done(false, true))).toBe("unknown");
  expect(after("over", done(false))).toBe("over");
});
