/** Plays one step: its duration on the screen, and the phase of each stage at each moment. */
import type { Phase } from "../../../placement/phases";
import type { Row } from "./timeline";

export interface StagePhase {
  phase: Phase;
  /** Microbatches that its machines compute. */
  microbatches: number[];
}

export interface Moment {
  /** Seconds since the beginning of the step. */
  at: number;
  /** One entry for each stage that has rows, in their order. */
  stages: StagePhase[];
}

/** Shorter steps are slowed down, because a fast change of colours cannot be followed and may hurt. */
const LEAST_S = 6;
/** More moments than this would change too fast to read. */
const MOST_MOMENTS = 120;

/** Seconds of playback for a step of this duration. */
export function playedSeconds(stepS: number): number {
  return Math.max(stepS, LEAST_S);
}

/** Places of the stages in the rows' order. */
export function stagesOf(rows: readonly Row[]): number[] {
  return [...new Set(rows.map((row) => row.stage))];
}

/** The moments at which the phase of a stage changes, in order; the first is the beginning of the step. */
export function momentsOf(rows: readonly Row[]): Moment[] {
  const stages = stagesOf(rows);
  const edges = rows.flatMap((row) => [...row.cells, ...(row.update ? [row.update] : [])].flatMap(({ start_s, stop_s }) => [start_s, stop_s]));
  const times = [...new Set([0, ...edges])].sort((one, other) => one - other);
  const moments: Moment[] = [];
  const thinned = Math.ceil(times.length / MOST_MOMENTS);
  let before = "";
  for (const at of times.filter((_, place) => place % thinned === 0)) {
    const found = stages.map((stage) => phaseAt(rows.filter((row) => row.stage === stage), at));
    const text = JSON.stringify(found);
    if (text !== before) moments.push({ at, stages: found });
    before = text;
  }
  return moments;
}

/** The last moment that is not after `at`. */
export function placeOf(moments: readonly Moment[], at: number): number {
  let place = 0;
  while (place + 1 < moments.length && moments[place + 1]!.at <= at) place += 1;
  return place;
}

function phaseAt(rows: readonly Row[], at: number): StagePhase {
  const cells = rows.flatMap((row) => row.cells.filter(({ start_s, stop_s }) => start_s <= at && at < stop_s));
  // If machines of a stage do different things, the backward pass is shown.
  const kind = cells.some((cell) => cell.kind === "B") ? "B" : "F";
  const microbatches = [...new Set(cells.filter((cell) => cell.kind === kind).map((cell) => cell.microbatch))].sort((a, b) => a - b);
  if (cells.length > 0) return { phase: kind, microbatches };
  const isUpdating = rows.some(({ update }) => update !== undefined && update.start_s <= at && at < update.stop_s);
  return { phase: isUpdating ? "update" : "waiting", microbatches: [] };
}
