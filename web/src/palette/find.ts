/** Matches entries of the command palette with the words that the user types. */

export interface Findable {
  label: string;
  /** Further search words, for example the English name. */
  also?: string | undefined;
}

/** 0: at the beginning, 1: at the beginning of a word, 2: anywhere; null: not in the text. */
function place(text: string, word: string): number | null {
  const at = text.indexOf(word);
  if (at < 0) return null;
  if (at === 0) return 0;
  for (let next = at; next >= 0; next = text.indexOf(word, next + 1)) {
    if (!/[\p{L}\p{N}]/u.test(text.charAt(next - 1))) return 1;
  }
  return 2;
}

/** Rank of an entry, lower is better; null if one of the words is missing. */
function rank({ label, also = "" }: Findable, words: readonly string[]): number | null {
  const [name, more] = [label.toLowerCase(), also.toLowerCase()];
  let sum = 0;
  for (const word of words) {
    const found = place(name, word) ?? (place(more, word) === null ? null : 3);
    if (found === null) return null;
    sum += found;
  }
  return sum;
}

/**
 * Entries that contain all words of the text, best first; equal entries keep their order. All entries if the text is
 * empty.
 */
export function matching<T extends Findable>(entries: readonly T[], text: string): T[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return [...entries];
  return entries
    .flatMap((entry) => {
      const found = rank(entry, words);
      return found === null ? [] : [{ entry, found }];
    })
    .sort((a, b) => a.found - b.found)
    .map(({ entry }) => entry);
}

/** Whether a text has the form of a job's id: `job-` and eight base32 characters. */
export function isJobId(text: string): boolean {
  return /^job-[a-z2-7]{8}$/.test(text);
}
