/** Positions in a text at which machines were lost. */
import type { DeploymentNews } from "../api/types";
import type { Answer, Mark } from "./types";

/** Recent lengths of a text over time. */
export interface Arrivals {
  /** Pairs (time in milliseconds, length of the text from then on), in order of time. */
  points: (readonly [ms: number, length: number])[];
}

/** Number of arrivals that are kept: losses are reported within about a second, in which no more arrive. */
const REMEMBERED = 1000;
/** If an answer still grows this long after a loss, another replica generates it. */
const TOUCHED_MS = 500;
/** The end of a text, regardless of its length. */
const END = Number.MAX_SAFE_INTEGER;

export function arrived({ points }: Arrivals, now: number, length: number): Arrivals {
  return { points: [...points.slice(1 - REMEMBERED), [now, length]] };
}

/** The length of a text at a given time. */
export function lengthAt({ points }: Arrivals, moment: number, length: number): number {
  const later = points.findIndex(([at]) => at > moment);
  if (later < 0) return length;
  if (later > 0) return points[later - 1]![1];
  return points.length < REMEMBERED ? 0 : points[0]![1];
}

/** The longest recent time without an arrival, and the length of the text at that time. */
function longestPause({ points }: Arrivals, now: number): { ms: number; length: number } {
  let longest = { ms: 0, length: 0 };
  points.forEach(([at, length], index) => {
    const ms = (points[index + 1]?.[0] ?? now) - at;
    if (ms > longest.ms) longest = { ms, length };
  });
  return longest;
}

/**
 * The mark of a loss in an answer; null if another replica generates it. The mark stays at the end of the text while
 * no new tokens can be computed: tokens that arrive meanwhile were sampled before the loss.
 */
export function markOf(news: NonNullable<DeploymentNews["interrupted"]>, arrivals: Arrivals, now: number): Mark | null {
  const moment = now - 1000 * news.ago_s;
  const grewOn = arrivals.points.some(([at]) => at > moment + TOUCHED_MS);
  if (news.of > 1 && grewOn) return null;
  return {
    key: keyOf(news),
    at: END,
    machines: news.machines,
    reason: news.reason,
    seconds: null,
  };
}

/**
 * The marks after a recovery: they are fixed at the length of the text when stages were formed again. @param until time
 * of the last arrival, if it was before now.
 */
export function settled(
  marks: readonly Mark[],
  news: NonNullable<DeploymentNews["went_on"]>,
  text: string,
  arrivals: Arrivals,
  now: number,
  until = now,
): Mark[] {
  const formed = now - 1000 * (news.ago_s - news.seconds);
  const pause = longestPause(arrivals, until);
  // Events and tokens have different delays, so a pause in the text gives the best position.
  const at = 2 * pause.ms > 1000 * news.seconds ? pause.length : lengthAt(arrivals, formed, text.length);
  return marks.map((mark) => (mark.key === keyOf(news) ? { ...mark, at, seconds: news.seconds } : mark));
}

/** The marks when the text ends or pauses: they are fixed at its current end. */
export function pinned({ marks, text }: Pick<Answer, "marks" | "text">): Mark[] {
  return marks.map((mark) => ({ ...mark, at: Math.min(mark.at, text.length) }));
}

export function keyOf({ replica, number }: { replica: number; number: number }): string {
  return `${replica}:${number}`;
}

/** Cuts a text at its marks: returns pieces, each with the marks before it. */
export function cut(text: string, marks: readonly Mark[]): { before: Mark[]; piece: string }[] {
  const places = [...new Set(marks.map((mark) => Math.min(mark.at, text.length)))].sort((a, b) => a - b);
  const edges = [0, ...places.filter((place) => place > 0), text.length];
  const pieces = edges.slice(0, -1).map((start, index) => ({
    before: marks.filter((mark) => Math.min(mark.at, text.length) === start),
    piece: text.slice(start, edges[index + 1]),
  }));
  return pieces;
}
