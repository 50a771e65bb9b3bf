/**
 * Parses the Markdown that models write: headings, lists, quotes, code, links and emphasis. Tables stay text.
 * HTML stays text, too. The result is data, from which React makes elements, so that no answer can add markup.
 */

export type Inline =
  | { kind: "text" | "code"; text: string }
  | { kind: "strong" | "em"; content: Inline[] }
  | { kind: "link"; href: string; content: Inline[] };

export type Block =
  | { kind: "paragraph"; content: Inline[] }
  | { kind: "heading"; level: number; content: Inline[] }
  | { kind: "code"; language: string; text: string }
  | { kind: "list"; start: number | null; items: Block[][] }
  | { kind: "quote"; content: Block[] }
  | { kind: "rule" };

/** A top-level block in its text: characters `start` to `end`, without the line end. */
export interface Part {
  start: number;
  end: number;
  block: () => Block;
}

interface Line {
  text: string;
  start: number;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})(?=\s)/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])(?=\s)/;
const QUOTE = /^ {0,3}> ?/;
/** Nested blocks that are parsed; deeper blocks stay text, so that a hostile answer causes no deep recursion. */
const DEEPEST = 6;

export function blocksOf(text: string, depth = 0): Block[] {
  return partsOf(text, depth).map(({ block }) => block());
}

/** The top-level blocks of a text. Finding them looks at each line once or twice; only `block()` parses their content. */
export function partsOf(text: string, depth = 0): Part[] {
  const lines = linesOf(text);
  const parts: Part[] = [];
  const add = (from: number, to: number, block: () => Block) => {
    const last = lines[to - 1]!;
    parts.push({ start: lines[from]!.start, end: last.start + last.text.length, block });
  };
  const joined = (from: number, to: number) => lines.slice(from, to).map((line) => line.text).join("\n");
  const item = (line: string) => (depth < DEEPEST ? ITEM.exec(line) : null);
  let paragraph: number | null = null;
  const endParagraph = (to: number) => {
    if (paragraph === null) return;
    const from = paragraph;
    add(from, to, () => ({ kind: "paragraph", content: inlineOf(joined(from, to)) }));
    paragraph = null;
  };
  let at = 0;
  while (at < lines.length) {
    const from = at;
    const line = lines[at]!.text;
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const first = item(line);
    if (fence !== null) {
      endParagraph(from);
      do at += 1;
      while (at < lines.length && !isEnd(lines[at]!.text, fence[1]!));
      const to = at;
      // A block that is not closed yet is still being written.
      at = Math.min(at + 1, lines.length);
      add(from, at, () => ({ kind: "code", language: fence[2]!, text: joined(from + 1, to) }));
    } else if (line.trim() === "") {
      endParagraph(from);
      at += 1;
    } else if (heading !== null) {
      endParagraph(from);
      at += 1;
      add(from, at, () => ({ kind: "heading", level: heading[1]!.length, content: inlineOf(titleOf(line.slice(heading[0].length))) }));
    } else if (isRule(line)) {
      endParagraph(from);
      at += 1;
      add(from, at, () => ({ kind: "rule" }));
    } else if (depth < DEEPEST && QUOTE.test(line)) {
      endParagraph(from);
      while (at < lines.length && QUOTE.test(lines[at]!.text)) at += 1;
      const quoted = lines.slice(from, at).map((one) => one.text.replace(QUOTE, ""));
      add(from, at, () => ({ kind: "quote", content: blocksOf(quoted.join("\n"), depth + 1) }));
    } else if (first !== null && (paragraph === null || first[3] === undefined || first[3] === "1")) {
      endParagraph(from);
      const isOrdered = first[3] !== undefined;
      const continues = (next: string, indent: number) =>
        (/^\s/.test(next) && next.search(/\S/) >= indent) || ofList(item(next), isOrdered);
      const items: string[][] = [];
      let indent = 0;
      for (; at < lines.length; at += 1) {
        const one = lines[at]!.text;
        const next = item(one);
        if (items.length > 0 && /^\s/.test(one) && one.search(/\S/) >= indent) items.at(-1)!.push(one.slice(indent));
        else if (next !== null && ofList(next, isOrdered) && !isRule(one)) {
          const rest = one.slice(next[0].length);
          const text = rest.trimStart();
          indent = next[0].length + Math.min(rest.length - text.length, 4);
          items.push([text]);
        } else if (one.trim() === "" && at + 1 < lines.length && continues(lines[at + 1]!.text, indent)) items.at(-1)!.push("");
        else break;
      }
      const start = isOrdered ? Number(first[3]) : null;
      add(from, at, () => ({ kind: "list", start, items: items.map((one) => blocksOf(one.join("\n"), depth + 1)) }));
    } else {
      paragraph ??= from;
      at += 1;
    }
  }
  endParagraph(at);
  return parts;
}

/** For each mark, the number of blocks before it: the mark belongs to the first boundary at or after its position. */
export function placesOf(parts: readonly Pick<Part, "start">[], marks: readonly { at: number }[]): number[] {
  return marks.map(({ at }) => {
    const place = parts.findIndex(({ start }) => start >= at);
    return place < 0 ? parts.length : place;
  });
}

function linesOf(text: string): Line[] {
  const lines: Line[] = [];
  let start = 0;
  for (const { index, 0: end } of text.matchAll(/\r\n?|\n/g)) {
    lines.push({ text: text.slice(start, index), start });
    start = index + end.length;
  }
  lines.push({ text: text.slice(start), start });
  return lines;
}

function isEnd(line: string, fence: string): boolean {
  const bare = line.trim();
  return /^ {0,3}[`~]/.test(line) && bare.length >= fence.length && bare === fence[0]!.repeat(bare.length);
}

function isRule(line: string): boolean {
  const sign = /^ {0,3}([-*_])/.exec(line)?.[1];
  if (sign === undefined) return false;
  const bare = line.replace(/\s/g, "");
  return bare.length >= 3 && bare === sign.repeat(bare.length);
}

function ofList(item: RegExpExecArray | null, isOrdered: boolean): boolean {
  return item !== null && (item[3] !== undefined) === isOrdered;
}

/** The text of a heading, without the signs that may close it. */
function titleOf(rest: string): string {
  const title = rest.trim();
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(title[end - 1]!) ? title.slice(0, end).trimEnd() : title;
}

/**
 * Code, links, strong and emphasized text; none spans lines. The scan goes forward once: each search for a closing sign
 * starts at the last one found, so that many opening signs take linear time.
 */
export function inlineOf(text: string, depth = 0): Inline[] {
  const found: Inline[] = [];
  const add = (from: number, to: number) => {
    if (to > from) found.push({ kind: "text", text: text.slice(from, to) });
  };
  const signs = /[`[*_]/g;
  const closings = new Map<string, number>();
  /** First position from `at` on that `next` finds; `next` is called with ascending positions. */
  const closing = (name: string, at: number, next: (at: number) => number): number => {
    const known = closings.get(name) ?? -1;
    if (known >= at) return known;
    const place = next(at);
    closings.set(name, place < 0 ? text.length : place);
    return closings.get(name)!;
  };
  const lineEnd = (at: number) => closing("\n", at, (from) => text.indexOf("\n", from));
  let written = 0;
  let at = 0;
  while (depth < DEEPEST) {
    signs.lastIndex = at;
    const sign = signs.exec(text);
    if (sign === null) break;
    at = sign.index;
    const character = sign[0];
    let one: Inline | null = null;
    let to = at + 1;
    if (character === "`") {
      const run = runAt(text, at);
      const end = closing(`${run} backticks`, at + run, (from) => nextRun(text, from, run));
      to = at + run;
      if (end < lineEnd(at)) {
        one = { kind: "code", text: text.slice(at + run, end) };
        to = end + run;
      }
    } else if (character === "[") {
      const link = linkAt(text, at);
      if (link !== null) {
        to = link.to;
        const href = safeHref(link.href);
        one = href === null ? { kind: "text", text: text.slice(at, to) } : { kind: "link", href, content: inlineOf(link.label, depth + 1) };
      }
    } else if (text[at + 1] === character) {
      const end = closing(character + character, at + 3, (from) => nextStrong(text, from, character));
      const opens = /\S/.test(text[at + 2] ?? " ") && !(character === "_" && isWord(text[at - 1]));
      to = at + 2;
      if (opens && end < lineEnd(at)) {
        // The first of three signs closes the inner emphasis: ***both***.
        const inner = text[end + 2] === character && text[end + 3] !== character ? end + 1 : end;
        one = { kind: "strong", content: inlineOf(text.slice(at + 2, inner), depth + 1) };
        to = inner + 2;
      }
    } else if (/[^\s*_]/.test(text[at + 1] ?? " ") && !isWord(text[at - 1])) {
      const end = closing(character, at + 1, (from) => text.indexOf(character, from));
      if (end < lineEnd(at) && /\S/.test(text[end - 1]!) && !isWord(text[end + 1]) && text[end + 1] !== character) {
        one = { kind: "em", content: inlineOf(text.slice(at + 1, end), depth + 1) };
        to = end + 1;
      }
    }
    if (one !== null) {
      add(written, at);
      found.push(one);
      written = to;
    }
    at = to;
  }
  add(written, text.length);
  return found;
}

function isWord(character: string | undefined): boolean {
  return character !== undefined && /\w/.test(character);
}

/** Number of backticks at a place. */
function runAt(text: string, at: number): number {
  let end = at;
  while (text[end] === "`") end += 1;
  return end - at;
}

/** The next run of exactly `length` backticks; -1 if there is none. */
function nextRun(text: string, from: number, length: number): number {
  for (let at = text.indexOf("`", from); at >= 0; ) {
    const run = runAt(text, at);
    if (run === length) return at;
    at = text.indexOf("`", at + run);
  }
  return -1;
}

/** The next position of two signs that can end strong text; -1 if there is none. */
function nextStrong(text: string, from: number, sign: string): number {
  for (let at = text.indexOf(sign + sign, from); at >= 0; at = text.indexOf(sign + sign, at + 1)) {
    if (/\S/.test(text[at - 1]!) && !(sign === "_" && isWord(text[at + 2]))) return at;
  }
  return -1;
}

/** The link `[label](href)` at a place; null if there is none. Neither part contains its own opening sign. */
function linkAt(text: string, at: number): { label: string; href: string; to: number } | null {
  let close = at + 1;
  while (close < text.length && !"[]\n".includes(text[close]!)) close += 1;
  if (close === at + 1 || text[close] !== "]" || text[close + 1] !== "(") return null;
  let end = close + 2;
  while (end < text.length && !/[()\s]/.test(text[end]!)) end += 1;
  if (end === close + 2 || text[end] !== ")") return null;
  return { label: text.slice(at + 1, close), href: text.slice(close + 2, end), to: end + 1 };
}

/** The address of a link, if it leads to a web page or a mailbox; null for all others, such as `javascript:`. */
export function safeHref(href: string): string | null {
  try {
    const url = new URL(href);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // a relative address would lead into the dashboard
  }
}
