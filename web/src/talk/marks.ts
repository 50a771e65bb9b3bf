/** Where in a text machines were lost. */
import type { DeploymentNews } from "../api/types";
import type { Answer, Mark } from "./types";

/** How long a text was, and when: what came of it lately. */
export interface Arrivals {
  /** Moments in milliseconds, growing, with the length of the text from then on. */
  points: (readonly [ms: number, length: number])[];
}

/** Losses are told within a second or so; more arrivals than come in it are of no use. */
const REMEMBERED = 1000;
/** A text that grows for so long after a loss is written elsewhere. */
const TOUCHED_MS = 500;
/** The end of a text, however long it gets. */
const END = Number.MAX_SAFE_INTEGER;

export function arrived({ points }: Arrivals, now: number, length: number): Arrivals {
  return { points: [...points.slice(1 - REMEMBERED), [now, length]] };
}

/** The length of a text at a moment. */
export function lengthAt({ points }: Arrivals, moment: number, length: number): number {
  const later = points.findIndex(([at]) => at > moment);
  if (later < 0) return length;
  if (later > 0) return points[later - 1]![1];
  return points.length < REMEMBERED ? 0 : points[0]![1];
}

/** The longest time lately in which nothing came, and the length of the text then. */
function longestPause({ points }: Arrivals, now: number): { ms: number; length: number } {
  let longest = { ms: 0, length: 0 };
  points.forEach(([at, length], index) => {
    const ms = (points[index + 1]?.[0] ?? now) - at;
    if (ms > longest.ms) longest = { ms, length };
  });
  return longest;
}

/**
 * The mark of a loss in an answer; null where another replica writes it. It stays at the end of the text while nothing
 * new can be computed: tokens that are still on their way were drawn before.
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
 * The same marks when it continues: the mark stays where the text was when stages were formed again.
 *
 * @param until when the last of the text came, if that was before now.
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
  // News take their time to come, tokens theirs: where the text itself paused is seen best in the text.
  const at = 2 * pause.ms > 1000 * news.seconds ? pause.length : lengthAt(arrivals, formed, text.length);
  return marks.map((mark) => (mark.key === keyOf(news) ? { ...mark, at, seconds: news.seconds } : mark));
}

/** The same marks when nothing more comes of the text for now. */
export function pinned({ marks, text }: Pick<Answer, "marks" | "text">): Mark[] {
  return marks.map((mark) => ({ ...mark, at: Math.min(mark.at, text.length) }));
}

export function keyOf({ replica, number }: { replica: number; number: number }): string {
  return `${replica}:${number}`;
}

/** A text cut at its marks: pieces, and what stands before each. */
export function cut(text: string, marks: readonly Mark[]): { before: Mark[]; piece: string }[] {
  const places = [...new Set(marks.map((mark) => Math.min(mark.at, text.length)))].sort((a, b) => a - b);
  const edges = [0, ...places.filter((place) => place > 0), text.length];
  const pieces = edges.slice(0, -1).map((start, index) => ({
    before: marks.filter((mark) => Math.min(mark.at, text.length) === start),
    piece: text.slice(start, edges[index + 1]),
  }));
  return pieces;
}
