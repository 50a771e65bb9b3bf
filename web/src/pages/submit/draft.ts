/** A job as one YAML text, which the form changes in place. Comments and order are kept where possible. */
import { isCollection, isMap, parse, parseDocument, stringify, type Document } from "yaml";

const STYLE = { lineWidth: 0, flowCollectionPadding: false } as const;

export class Draft {
  readonly text: string;
  /** The parsed job; null while the text cannot be parsed. */
  readonly value: Readonly<Record<string, unknown>> | null;

  constructor(text: string) {
    this.text = text;
    const document = parseDocument(text, { prettyErrors: false });
    const value: unknown = document.errors.length > 0 ? null : document.toJS();
    this.value = typeof value === "object" && value !== null && !Array.isArray(value) ? { ...value } : null;
  }

  get(path: readonly string[]): unknown {
    let found: unknown = this.value;
    for (const key of path) {
      if (typeof found !== "object" || found === null) return undefined;
      found = (found as Record<string, unknown>)[key];
    }
    return found;
  }

  /** Return the text with a value at this path. */
  with(path: readonly string[], value: unknown): string {
    return this.changed((document) => {
      for (let length = 1; length < path.length; length += 1) {
        const parent = path.slice(0, length);
        if (!isCollection(document.getIn(parent))) document.setIn(parent, document.createNode({}));
      }
      document.setIn(path, isPlain(value) ? value : document.createNode(value));
    });
  }

  /** Return the text without the value at this path, and without mappings that become empty. */
  without(path: readonly string[]): string {
    return this.changed((document) => {
      document.deleteIn(path);
      for (let length = path.length - 1; length > 0; length -= 1) {
        const parent = document.getIn(path.slice(0, length));
        if (!isMap(parent) || parent.items.length > 0) break;
        document.deleteIn(path.slice(0, length));
      }
    });
  }

  private changed(change: (document: Document) => void): string {
    const document = parseDocument(this.text);
    if (document.contents === null) document.contents = document.createNode({}) as never;
    change(document as unknown as Document);
    return document.toString(STYLE);
  }
}

function isPlain(value: unknown): boolean {
  return typeof value !== "object" || value === null;
}

/** Format a whole job as text. */
export function written(value: unknown): string {
  return stringify(value, STYLE);
}

/** Format a value on one line, `{min_lr_rate: 0.1}`. */
export function short(value: unknown): string {
  if (value === undefined || value === null) return "";
  return stringify(value, { ...STYLE, collectionStyle: "flow" }).trim();
}

/** Parse one line of YAML; if this fails, return the text itself, so that the server refuses it with a reason. */
export function readShort(text: string): unknown {
  try {
    return parse(text);
  } catch {
    return text;
  }
}
