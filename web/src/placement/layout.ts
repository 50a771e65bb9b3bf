/** The arithmetic of the placement picture. */
import type { Plan, Pool } from "../api/types";

/** Least share of the bar that a pool gets, so that a one-layer pool beside a hundred can still be seen. */
const LEAST_SHARE = 0.04;

/** Width of each pool in the bar, in shares of one: its layers, raised to `LEAST_SHARE` and scaled back. */
export function poolShares(plan: Pick<Plan, "num_layers" | "pools">): number[] {
  const raised = plan.pools.map((pool) => Math.max((pool.stop - pool.start) / plan.num_layers, LEAST_SHARE));
  const total = raised.reduce((sum, share) => sum + share, 0);
  return raised.map((share) => share / total);
}

/** Layers [3, 8) read "3–7". */
export function layerRange(pool: Pick<Pool, "start" | "stop">): string {
  return pool.stop - pool.start === 1 ? `${pool.start}` : `${pool.start}–${pool.stop - 1}`;
}

/** [0, 1, 2, 5] reads "0–2, 5". */
export function ranges(ids: readonly number[]): string {
  const runs: [number, number][] = [];
  for (const id of [...ids].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last !== undefined && id === last[1] + 1) last[1] = id;
    else runs.push([id, id]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

export function joined(names: readonly string[]): string {
  return new Intl.ListFormat("en").format(names);
}
