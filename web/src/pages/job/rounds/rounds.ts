/** Rounds of a job whose branches merge, read from its events. */
import type { ClusterEvent } from "../../../api/types";

/** One branch in one merge. */
export interface BranchRound {
  number: number;
  /** The round of the contribution; smaller than the round of the merge if it was late. */
  round: number;
  loss: number | null;
  /** Time of the steps. */
  seconds: number;
  /** Time from the arrival of the contribution to the merge. */
  waited_s: number;
  sent_bytes: number;
}

/** Data of an event of kind `round`. */
export interface RoundMerged {
  round: number;
  step: number;
  branches: BranchRound[];
  /** Branches without a contribution to this round. */
  missing: number[];
  /** Size of the update that each branch receives. */
  update_bytes: number;
  /** Size of the weights in float32. */
  weight_bytes: number;
  /** Distance of the branches' own weights from the merged ones, relative to their norm; null if they have none. */
  consensus_distance?: number | null;
}

/** How a policy merges. */
export interface Merging {
  /** Whether each contribution is merged alone, as soon as it arrives: a parameter server with staleness. */
  is_apart: boolean;
  /** Whether branches keep their own weights, so that only the merged branches receive an update. */
  keeps_own: boolean;
}

export interface Round extends RoundMerged, Merging {
  /** Time since the previous merge; null for the first merge of an attempt. */
  elapsed_s: number | null;
}

export function mergingOf(policy: { kind: string; staleness?: number | "unbounded" }): Merging {
  return {
    is_apart: policy.kind === "parameter_server" && policy.staleness !== 0,
    keeps_own: policy.kind === "elastic" || policy.kind === "gossip",
  };
}

/** The merges in order. */
export function roundsIn(events: readonly ClusterEvent[], merging: Merging): Round[] {
  const found: Round[] = [];
  let before: ClusterEvent | undefined;
  for (const event of events) {
    if (event.kind !== "round") continue;
    const merged = event.data as unknown as RoundMerged;
    // If the newest weights are damaged, the next attempt merges their rounds again.
    while ((found.at(-1)?.round ?? 0) >= merged.round) found.pop();
    const follows = before !== undefined && before.attempt === event.attempt;
    found.push({ ...merged, ...merging, elapsed_s: follows ? (Date.parse(event.at) - Date.parse(before!.at)) / 1000 : null });
    before = event;
  }
  return found;
}

/** Numbers of the branches in these rounds, ascending. */
export function branchesIn(rounds: readonly Round[]): number[] {
  const found = rounds.flatMap(({ branches, missing }) => [...branches.map(({ number }) => number), ...missing]);
  return [...new Set(found)].sort((a, b) => a - b);
}

/** The contributions of one branch that a merge contains, late ones first; none if the branch is missing. */
export function runsOf({ branches }: Round, number: number): BranchRound[] {
  return branches.filter((run) => run.number === number).sort((a, b) => a.round - b.round);
}

/** Number of merges that were missing from the weights with which a contribution was computed. */
export function ageOf({ round }: Round, run: BranchRound): number {
  return round - run.round;
}

/** Whether a contribution missed its own round. */
export function isLate(round: Round, run: BranchRound): boolean {
  return !round.is_apart && ageOf(round, run) > 0;
}

/** Time of a round in which the branch neither computed steps nor waited; null if it is unknown. */
export function otherSeconds({ round, elapsed_s, is_apart }: Round, run: BranchRound): number | null {
  // The time of a late contribution is not the time of the round, and branches that push alone have no common round.
  if (elapsed_s === null || is_apart || run.round !== round) return null;
  return Math.max(0, elapsed_s - run.seconds - run.waited_s);
}

/** Time of the longest bar in seconds. */
export function longestOf(rounds: readonly Round[]): number {
  const times = rounds.flatMap((round) =>
    round.branches.map((run) => run.seconds + run.waited_s + (otherSeconds(round, run) ?? 0)),
  );
  return Math.max(1e-6, ...times);
}

export interface Totals {
  /** Bytes of one branch, averaged over the branches. */
  sent_bytes: number;
  received_bytes: number;
  /** Ratio of the bytes of the same exchanges in float32 to the actual bytes; null if there was no exchange. */
  ratio: number | null;
  /** Fraction of the time in which branches computed, averaged over the branches; null if it is unknown. */
  computing: number | null;
}

export function totalsOf(rounds: readonly Round[]): Totals {
  const branches = Math.max(1, branchesIn(rounds).length);
  const totals = { sent: 0, received: 0, plain: 0, computed_s: 0, elapsed_s: 0 };
  for (const round of rounds) {
    totals.sent += sum(round.branches.map((run) => run.sent_bytes));
    const receivers = round.keeps_own ? round.branches.length : branches;
    totals.received += receivers * round.update_bytes;
    totals.plain += (round.branches.length + receivers) * round.weight_bytes;
    if (round.elapsed_s === null) continue;
    totals.elapsed_s += branches * round.elapsed_s;
    totals.computed_s += sum(round.branches.map((run) => run.seconds));
  }
  const exchanged = totals.sent + totals.received;
  return {
    sent_bytes: totals.sent / branches,
    received_bytes: totals.received / branches,
    ratio: exchanged > 0 ? totals.plain / exchanged : null,
    // Times of events have small errors, which are visible with very short rounds.
    computing: totals.elapsed_s > 0 ? Math.min(1, totals.computed_s / totals.elapsed_s) : null,
  };
}

function sum(values: readonly number[]): number {
  return values.reduce((all, one) => all + one, 0);
}
