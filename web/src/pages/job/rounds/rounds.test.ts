import { expect, test } from "vitest";

import { eventOf } from "../../../api/events/fixture";
import { branchesIn, isLate, longestOf, mergingOf, otherSeconds, roundsIn as roundsOf, runsOf, totalsOf, type BranchRound, type RoundMerged } from "./rounds";

const run = (number: number, round: number, other: Partial<BranchRound> = {}): BranchRound => ({
  number,
  round,
  loss: 2.5,
  seconds: 6,
  waited_s: 1,
  sent_bytes: 100,
  ...other,
});

const roundsIn = (events: Parameters<typeof roundsOf>[0], policy: Parameters<typeof mergingOf>[0] = { kind: "local" }) =>
  roundsOf(events, mergingOf(policy));

/** An event that merges at the given second. */
function merged(round: number, second: number, other: Partial<RoundMerged> = {}, attempt = 1) {
  const data = { round, step: 30 * round, branches: [run(0, round), run(1, round)], missing: [], update_bytes: 300, weight_bytes: 10_400, ...other };
  const at = new Date(Date.UTC(2026, 0, 31, 12, 0, second)).toISOString();
  return { ...eventOf("round", data, round), at, attempt };
}

test("rounds are found among other events, with the time since the merge before", () => {
  const rounds = roundsIn([merged(1, 0), eventOf("note", { message: "ash joined" }), merged(2, 10), merged(3, 30, {}, 2)]);
  expect(rounds.map(({ round, step, elapsed_s }) => [round, step, elapsed_s])).toEqual([
    [1, 30, null],
    [2, 60, 10],
    [3, 90, null],
  ]);
});

test("a round that is merged again replaces the earlier one and those after it", () => {
  const rounds = roundsIn([merged(1, 0), merged(2, 10), merged(3, 20), merged(2, 30, { step: 61 }, 2)]);
  expect(rounds.map(({ round, step }) => [round, step])).toEqual([
    [1, 30],
    [2, 61],
  ]);
});

test("missing branches have a row, and late contributions come before those of the round", () => {
  const late = merged(2, 10, { branches: [run(0, 2), run(1, 2), run(1, 1)], missing: [2] });
  const [round] = roundsIn([late]);
  expect(branchesIn([round!])).toEqual([0, 1, 2]);
  expect(runsOf(round!, 1).map((one) => one.round)).toEqual([1, 2]);
  expect(runsOf(round!, 2)).toEqual([]);
});

test("what is neither computing nor waiting is exchange; it is unknown for late contributions", () => {
  const [first, second] = roundsIn([merged(1, 0), merged(2, 10, { branches: [run(0, 2), run(1, 1)], missing: [1] })]);
  expect(otherSeconds(first!, first!.branches[0]!)).toBeNull();
  expect(second!.branches.map((one) => otherSeconds(second!, one))).toEqual([3, null]);
  expect(longestOf([first!])).toBe(7);
  expect(longestOf([first!, second!])).toBe(10);
});

test("totals are of one branch, and compare with float32", () => {
  const totals = totalsOf(roundsIn([merged(1, 0), merged(2, 10), merged(3, 20)]));
  expect(totals).toEqual({ sent_bytes: 300, received_bytes: 900, ratio: 52, computing: 0.6 });
});

test("a branch that is missing sends nothing, but receives the update", () => {
  const totals = totalsOf(roundsIn([merged(1, 0), merged(2, 10, { branches: [run(0, 2)], missing: [1] })]));
  expect([totals.sent_bytes, totals.received_bytes]).toEqual([150, 600]);
  expect(totals.ratio).toBeCloseTo((7 * 10_400) / 1500);
  expect(totals.computing).toBeCloseTo(0.3);
});

test("nothing is divided by zero", () => {
  expect(totalsOf([])).toEqual({ sent_bytes: 0, received_bytes: 0, ratio: null, computing: null });
  const at_once = totalsOf(roundsIn([merged(1, 0), merged(2, 0)]));
  expect(at_once.computing).toBeNull();
  expect(longestOf([])).toBeGreaterThan(0);
});

test("pushes to a parameter server are not late, and have no common round", () => {
  const events = [merged(1, 0), merged(2, 10, { branches: [run(1, 1)] }), merged(3, 12, { branches: [run(0, 2)] })];
  const late = (rounds: ReturnType<typeof roundsIn>) => rounds.map((round) => round.branches.some((one) => isLate(round, one)));
  expect(late(roundsIn(events))).toEqual([false, true, true]);
  expect(late(roundsIn(events, { kind: "parameter_server", staleness: 0 }))).toEqual([false, true, true]);
  const pushes = roundsIn(events, { kind: "parameter_server", staleness: 1 });
  expect(late(pushes)).toEqual([false, false, false]);
  expect(otherSeconds(pushes[2]!, pushes[2]!.branches[0]!)).toBeNull();
});

test("only merged branches receive an update for weights of their own", () => {
  const events = [merged(1, 0), merged(2, 10, { branches: [run(0, 2)], missing: [1] })];
  expect(totalsOf(roundsIn(events, { kind: "elastic" })).received_bytes).toBe(450);
  expect(totalsOf(roundsIn(events)).received_bytes).toBe(600);
});
