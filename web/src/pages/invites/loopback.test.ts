import { expect, test } from "vitest";

import { isLoopback } from "./loopback";

test("only loopback addresses are reached by nobody else", () => {
  expect(["http://127.0.0.1:8700", "https://localhost", "http://[::1]:8700/"].map(isLoopback)).toEqual([true, true, true]);
  expect(["http://192.0.2.1:8700", "https://127.example.org", "nothing"].map(isLoopback)).toEqual([false, false, false]);
});
