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

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])(\s+)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
/** Nested blocks that are parsed; deeper ones stay text, so that a hostile answer costs no deep recursion. */
const DEEPEST = 6;

export function blocksOf(text: string, depth = 0): Block[] {
  const lines = text.split("\n");
  const blocks: Block[] = [];
  let paragraph: string[] = [];
  const end = () => {
    if (paragraph.length > 0) blocks.push({ kind: "paragraph", content: inlineOf(paragraph.join("\n")) });
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at]!;
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    const item = depth < DEEPEST ? ITEM.exec(line) : null;
    if (fence !== null) {
      end();
      const code: string[] = [];
      // A block that is not closed yet is still being written.
      while (++at < lines.length && !isEnd(lines[at]!, fence[1]!)) code.push(lines[at]!);
      blocks.push({ kind: "code", language: fence[2]!, text: code.join("\n") });
    } else if (line.trim() === "") {
      end();
    } else if (heading !== null) {
      end();
      blocks.push({ kind: "heading", level: heading[1]!.length, content: inlineOf(heading[2]!) });
    } else if (RULE.test(line)) {
      end();
      blocks.push({ kind: "rule" });
    } else if (depth < DEEPEST && QUOTE.test(line)) {
      end();
      const quoted = [line];
      while (at + 1 < lines.length && QUOTE.test(lines[at + 1]!)) quoted.push(lines[(at += 1)]!);
      blocks.push({ kind: "quote", content: blocksOf(quoted.map((one) => one.replace(QUOTE, "")).join("\n"), depth + 1) });
    } else if (item !== null && (paragraph.length === 0 || item[3] === undefined || item[3] === "1")) {
      end();
      const isOrdered = item[3] !== undefined;
      const items: string[][] = [];
      let indent = 0;
      for (; at < lines.length; at += 1) {
        const next = ITEM.exec(lines[at]!);
        const isBelow = items.length > 0 && /^\s/.test(lines[at]!) && lines[at]!.search(/\S/) >= indent;
        if (isBelow) items.at(-1)!.push(lines[at]!.slice(indent));
        else if (next !== null && (next[3] !== undefined) === isOrdered && !RULE.test(lines[at]!)) {
          indent = next[1]!.length + next[2]!.length + Math.min(next[4]!.length, 4);
          items.push([next[5]!]);
        } else if (lines[at]!.trim() === "" && at + 1 < lines.length && continues(lines[at + 1]!, indent, isOrdered)) items.at(-1)!.push("");
        else break;
      }
      at -= 1;
      blocks.push({ kind: "list", start: isOrdered ? Number(item[3]) : null, items: items.map((one) => blocksOf(one.join("\n"), depth + 1)) });
    } else {
      paragraph.push(line);
    }
  }
  end();
  return blocks;
}

function isEnd(line: string, fence: string): boolean {
  const found = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line);
  return found !== null && found[1]![0] === fence[0] && found[1]!.length >= fence.length;
}

/** Whether a list goes on after an empty line. */
function continues(line: string, indent: number, isOrdered: boolean): boolean {
  const next = ITEM.exec(line);
  return (next !== null && (next[3] !== undefined) === isOrdered) || (/^\s/.test(line) && line.search(/\S/) >= indent);
}

/** Code, links, strong and emphasized text, in this order. No pattern backtracks over more than one line. */
const INLINE = /(`+)([^`\n](?:[^\n]{0,2000}?[^`\n])??)\1(?!`)|\[([^[\]\n]{1,400})\]\(([^()\s]{1,2000})\)|(\*\*|__)(?=\S)([^\n]{1,2000}?\S)\5|(?<![\w*])([*_])(?=[^\s*_])([^\n*_]{0,2000}?[^\s*_])\7(?![\w*])/;

export function inlineOf(text: string, depth = 0): Inline[] {
  const found: Inline[] = [];
  let rest = text;
  for (let match = depth < DEEPEST ? INLINE.exec(rest) : null; match !== null; match = INLINE.exec(rest)) {
    if (match.index > 0) found.push({ kind: "text", text: rest.slice(0, match.index) });
    const [whole, , code, label, href, , strong, , em] = match;
    if (code !== undefined) found.push({ kind: "code", text: code });
    else if (label !== undefined) {
      const safe = safeHref(href!);
      if (safe === null) found.push({ kind: "text", text: whole });
      else found.push({ kind: "link", href: safe, content: inlineOf(label, depth + 1) });
    } else if (strong !== undefined) found.push({ kind: "strong", content: inlineOf(strong, depth + 1) });
    else found.push({ kind: "em", content: inlineOf(em!, depth + 1) });
    rest = rest.slice(match.index + whole.length);
  }
  if (rest !== "") found.push({ kind: "text", text: rest });
  return found;
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
