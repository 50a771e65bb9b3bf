import { expect, test } from "vitest";

import { GRANTABLE, may } from "./scopes";

test("a scope includes what the server says", () => {
  const opened = (...scopes: Parameters<typeof may>[0]["scopes"]) => GRANTABLE.filter((scope) => may({ scopes }, scope));
  expect(opened("chat")).toEqual(["chat"]);
  expect(opened("read")).toEqual(["read"]);
  expect(opened("chat", "read")).toEqual(["chat", "read"]);
  expect(opened("submit")).toEqual(["chat", "read", "submit"]);
  expect(opened("admin")).toEqual(["chat", "read", "submit", "admin"]);
  expect(opened("contribute")).toEqual([]);
});
