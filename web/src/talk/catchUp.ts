/**
 * An answer that broke off is continued by asking for it again with the same seed, which gives the same text. What is
 * known of it stays on screen while that comes again.
 */

/** What is shown of a text of which `known` was there before, now that `fresh` has come of it. */
export function caughtUp(known: string, fresh: string): string {
  return known.startsWith(fresh) ? known : fresh;
}

/** How much two texts have in common at their beginning, in characters. */
export function commonLength(one: string, other: string): number {
  const most = Math.min(one.length, other.length);
  let length = 0;
  while (length < most && one[length] === other[length]) length += 1;
  return length;
}
