/**
 * First words of texts, which tell a text that begins with a word ("layers 0-3 run on ash") from one that begins with a
 * name ("ash holds layers 0-3"). Only texts that begin with a word get a capital.
 */

/**
 * First word -> its possible followers, separated by spaces: a word, `.` for a mark or the end, `*` for anything. A
 * value is `{}`, followed by the next word or mark if there is one.
 */
export type Starts = Readonly<Record<string, string>>;

/** Number of followers above which any follower is accepted, for words such as "the". */
const MANY = 7;
const WORD = /^[a-z][a-z'-]*$/;
/** Commands stay as they are. */
const COMMANDS = new Set(["share-compute", "pip", "systemctl", "nvidia-smi"]);

/** The first words of templates, which are texts with `{}` or `{{name}}` instead of their values. */
export function startsOf(templates: Iterable<string>): Starts {
  const found = new Map<string, Set<string>>();
  for (const template of templates) {
    const [first, ...rest] = template.replaceAll(/\{\{\w+\}\}/g, "{}").split(" ");
    const word = bare(first!);
    if (!WORD.test(word) || COMMANDS.has(word)) continue;
    found.set(word, (found.get(word) ?? new Set<string>()).add(follower(first!, rest)));
  }
  return Object.fromEntries(
    [...found].sort().map(([word, followers]) => [word, followers.size > MANY ? "*" : [...followers].join(" ")]),
  );
}

/** Whether the first word of a text is known as the beginning of texts. */
export function beginsWithWord(text: string, starts: Starts): boolean {
  const [first, ...rest] = text.split(" ");
  const word = bare(first!);
  // `starts[word]` alone is not enough, because "constructor" is a property of every object.
  if (!Object.hasOwn(starts, word)) return false;
  const value = rest.length > 0 ? follower(first!, ["{}", ...rest.slice(1)]) : ".";
  // A value of several words ends at a mark.
  const marks = rest.map((other) => `{}${other.slice(bare(other).length)}`).filter((mark) => mark !== "{}");
  const possible = new Set(["*", follower(first!, rest), value, ...marks]);
  return starts[word]!.split(" ").some((one) => possible.has(one));
}

/** What follows the first word. */
function follower(first: string, [second = "", third = ""]: string[]): string {
  if (first !== bare(first) || second === "") return ".";
  if (!second.includes("{}")) return bare(second);
  if (third === "" || second !== bare(second)) return `{}${second.slice(bare(second).length)}`;
  return third.includes("{}") ? "*" : `{}${bare(third)}`;
}

function bare(word: string): string {
  return word.replace(/[,;:.]$/, "");
}
