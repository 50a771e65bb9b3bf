import { expect, test } from "vitest";

import type { Alert } from "../api/types";
import { isAcknowledged, pruned, versionOf } from "./acknowledged";
import { groupAlerts } from "./groups";

function lost(name: string, reason = "its Ray node died", since = "2026-01-31T12:00:00Z"): Alert {
  const text = `machine ${name} was lost: ${reason}`;
  return { id: `machine-lost ${name}`, kind: "machine-lost", severity: "warning", name, text, since } as Alert;
}

const disk = (missing: string) =>
  ({ id: "disk", kind: "disk", severity: "error", text: `the disk lacks ${missing} of what the server needs` }) as Alert;

test("alerts with the same condition are one group, others are not", () => {
  const groups = groupAlerts([disk("1 GiB"), lost("ash"), lost("birch", "it left"), lost("cedar")]);
  expect(groups.map(({ condition, alerts }) => [condition, alerts.length])).toEqual([
    ["the disk lacks 1 GiB of what the server needs", 1],
    ["was lost: its Ray node died", 2],
    ["was lost: it left", 1],
  ]);
});

test("a changed alert is not acknowledged any more", () => {
  const known = { [lost("ash").id]: versionOf(lost("ash")), disk: versionOf(disk("1.5 GiB")) };
  expect(isAcknowledged(known, lost("ash"))).toBe(true);
  expect(isAcknowledged(known, lost("ash", "it left"))).toBe(false);
  expect(isAcknowledged(known, lost("ash", undefined, "2026-01-31T13:00:00Z"))).toBe(false);
  expect(isAcknowledged(known, disk("870 MiB"))).toBe(true);
});

test("an alert that ended is forgotten", () => {
  const known = { [lost("ash").id]: "a", disk: "b" };
  expect(pruned(known, [disk("1 GiB")])).toEqual({ disk: "b" });
  expect(pruned(known, [disk("1 GiB"), lost("ash")])).toBe(known);
});
