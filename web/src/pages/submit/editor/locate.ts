/** Finds the line of a job file that causes a problem. */
import { isMap, isSeq, LineCounter, parseDocument, type Document, type Node } from "yaml";

export interface Marked {
  /** Counted from 1. */
  line: number;
  field: string;
  problem: string;
}

/** Syntax errors of a YAML text, found while the user types; the server reports all other problems. */
export function syntaxProblems(text: string): Marked[] {
  const lines = new LineCounter();
  const document = parseDocument(text, { lineCounter: lines, prettyErrors: false });
  return document.errors.map((error) => ({
    line: lines.linePos(error.pos[0]).line,
    field: "",
    problem: error.message,
  }));
}

/** Put each problem on the line of its field, or of the nearest parent in the text. */
export function locate(text: string, problems: readonly { field: string; problem: string }[]): Marked[] {
  const lines = new LineCounter();
  const document = parseDocument(text, { lineCounter: lines });
  return problems.map(({ field, problem }) => ({
    line: lines.linePos(offsetOf(document, field === "" ? [] : field.split("."), problem)).line,
    field,
    problem,
  }));
}

function offsetOf(document: Document.Parsed, path: readonly string[], problem: string): number {
  let node: Node | null = document.contents;
  let offset = node?.range?.[0] ?? 0;
  // An unknown key is reported at its parent, by name.
  const unknown = /^unknown key '([^']+)'/.exec(problem)?.[1];
  for (const part of unknown === undefined ? path : [...path, unknown]) {
    if (isMap(node)) {
      const pair: (typeof node.items)[number] | undefined = node.items.find((item) => String(item.key) === part);
      if (pair === undefined) break;
      offset = (pair.key as Node).range?.[0] ?? offset;
      node = pair.value as Node | null;
    } else if (isSeq(node)) {
      const item = node.items[Number(part)] as Node | undefined;
      if (item === undefined) break;
      offset = item.range?.[0] ?? offset;
      node = item;
    } else break;
  }
  return offset;
}
