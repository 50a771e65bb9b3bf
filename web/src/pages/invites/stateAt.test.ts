import { expect, test } from "vitest";

import type { Invite } from "../../api/types";
import { stateAt } from "./stateAt";

const invite = { state: "open", expires_at: "2026-01-31T12:00:00Z" } as Invite;
const noon = Date.parse("2026-01-31T12:00:00Z");

test("an open invite expires by time alone, and no other does", () => {
  expect(stateAt(invite, noon - 1)).toBe("open");
  expect(stateAt(invite, noon)).toBe("expired");
  expect(stateAt({ ...invite, state: "used" }, noon)).toBe("used");
});
