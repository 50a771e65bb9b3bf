/**
 * An interrupted answer is continued by the same request with the same seed, which gives the same text. The known part
 * stays on screen while the server regenerates it.
 */

/** The text to show: `known` until `fresh` is longer or differs from it. */
export function caughtUp(known: string, fresh: string): string {
  return known.startsWith(fresh) ? known : fresh;
}

/** Length of the common prefix of two texts, in characters. */
export function commonLength(one: string, other: string): number {
  const most = Math.min(one.length, other.length);
  let length = 0;
  while (length < most && one[length] === other[length]) length += 1;
  return length;
}
