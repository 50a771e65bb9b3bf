/**
 * Translates a text of the server by finding its template. The rules and their reasons are in
 * `platform/share_compute/translations/translator.py`; `tests/platform/translations/cases.json` tests both.
 */

const MOST_CHARACTERS = 4000;
const MOST_DEPTH = 5;
const MOST_PARTS = 16;
const MOST_REMEMBERED = 2000;
const SHORT = 6;
const CHARACTERS_PER_LETTER = 12;
/** Number of first or last characters by which templates are indexed. */
const ENDS = 3;
const SEPARATORS = [
  ["; ", "；"],
  [": ", "："],
  [". ", "。"],
  [", and ", "，并且"],
  [", ", "，"],
] as const;
const MARK = /[,;:.] | \(/;
const FEW = 10;
const PROSE = /[A-Za-z]{2,} [A-Za-z]{2,}/;
/** End of a literal part after which a value may be a text of any kind. */
const FREE = /(?:[,;:.] (?:and |because )?| {2})$/;
const WIDE = /^[\u3000-\u9fff\uff00-\uffef]/;
const WIDE_END = /[\u3000-\u9fff\uff00-\uffef]$/;
const WIDE_SPACE = /[\u3000-\u9fff\uff00-\uffef] $/;
const SPACE_WIDE = /^ [\u3000-\u9fff\uff00-\uffef]/;
const LIST = /^[^\s,]+(?:, [^\s,]+)* and [^\s,]+$/;

class Template {
  private readonly parts: string[];
  /** Number of literal characters. */
  readonly weight: number;
  private readonly most: number;
  private readonly areNames: boolean[];

  constructor(
    template: string,
    private readonly translation: string,
  ) {
    this.parts = template.split("{}");
    const literal = this.parts.join("");
    this.weight = literal.length;
    const letters = literal.match(/\p{L}/gu)?.length ?? 0;
    this.areNames = this.parts.slice(1).map((end, place) => {
      const start = this.parts[place]!;
      return letters < FEW && !FREE.test(start) && !(start === "" && /^[,;:.]/.test(end));
    });
    this.most = letters < SHORT ? letters * CHARACTERS_PER_LETTER : MOST_CHARACTERS;
  }

  /** The fixed first characters of the template's texts, or the last ones after "…"; only "…" if neither is fixed. */
  get key(): string {
    const [first, last] = [this.parts[0]!, this.parts.at(-1)!];
    if (first.length >= ENDS) return first.slice(0, ENDS);
    return `…${last.length >= ENDS ? last.slice(-ENDS) : ""}`;
  }

  /** The values in a text; undefined if the text does not match this template. */
  values(text: string): string[] | undefined {
    const first = this.parts[0]!;
    const last = this.parts.at(-1)!;
    let place = first.length;
    const end = text.length - last.length;
    if (end < place || !text.startsWith(first) || !text.endsWith(last)) return undefined;
    const values: string[] = [];
    const between = this.parts.slice(1, -1);
    for (const [index, part] of between.entries()) {
      const following = part || (between.slice(index).find((other) => other !== "") ?? "");
      let found = following === "" ? end : text.indexOf(following, place);
      if (found < 0 || (following !== "" && found + following.length > end)) return undefined;
      if (part === "") {
        const value = text.slice(place, found);
        const length = value.startsWith(" (") ? value.indexOf(")") + 1 : value.slice(1).search(MARK) + 1;
        if (length > 0) found = place + length;
      }
      values.push(text.slice(place, found));
      place = found + part.length;
    }
    values.push(text.slice(place, end));
    if (values.reduce((sum, value) => sum + value.length, 0) > this.most) return undefined;
    return values.some((value, place) => this.areNames[place] && PROSE.test(value) && !LIST.test(value)) ? undefined : values;
  }

  /** Whether the first value probably contains more than one value. */
  beginsOddly([first]: string[]): boolean {
    return this.parts[0] === "" && !/^[,;:.]/.test(this.parts[1]!) && /[;:,] | \(/.test(first!) && !LIST.test(first!);
  }

  /**
   * The translation with these values; `{2}` is the second value, `{}` the next one. Spaces are kept beside non-Chinese
   * text.
   */
  filled(values: string[]): string {
    let next = 0;
    return this.translation.split(/\{(\d*)\}/).reduce((text, part, place) => {
      const shown = place % 2 === 0 ? part : (values[part === "" ? next++ : Number(part) - 1] ?? "");
      if (WIDE_SPACE.test(text) && WIDE.test(shown)) return text.slice(0, -1) + shown;
      if (WIDE_END.test(text) && SPACE_WIDE.test(shown)) return text + shown.slice(1);
      return text + shown;
    }, "");
  }
}

/** Translates texts with a catalogue: English template -> translation. */
export class Translator {
  private readonly whole = new Map<string, string>();
  private readonly byKey = new Map<string, Template[]>();

  constructor(catalogue: Readonly<Record<string, string>>) {
    const templates: Template[] = [];
    for (const [template, translation] of Object.entries(catalogue)) {
      if (template.includes("{}")) templates.push(new Template(template, translation));
      else this.whole.set(template, translation);
    }
    templates.sort((one, other) => other.weight - one.weight);
    for (const template of templates) {
      this.byKey.set(template.key, [...(this.byKey.get(template.key) ?? []), template]);
    }
  }

  /** A text in the catalogue's language; unchanged if no part of it is known. */
  translate(text: string): string {
    return this.translated(text, 0) ?? text;
  }

  private translated(text: string, depth: number): string | undefined {
    if (text === "" || text.length > MOST_CHARACTERS || depth > MOST_DEPTH) return undefined;
    return this.matched(text, depth, true) ?? this.divided(text, depth) ?? this.matched(text, depth, false);
  }

  /** The translation of a text that matches a template. */
  private matched(text: string, depth: number, strict: boolean): string | undefined {
    const whole = this.whole.get(text);
    if (whole !== undefined) return whole;
    const found = this.best(text, [text.slice(0, ENDS)], strict) ?? this.best(text, [`…${text.slice(-ENDS)}`, "…"], strict);
    return found?.template.filled(found.values.map((value) => this.value(value, depth + 1)));
  }

  /** The template with the most literal characters among those with these keys, and its values. */
  private best(text: string, keys: string[], strict: boolean): { template: Template; values: string[] } | undefined {
    let best: { template: Template; values: string[] } | undefined;
    for (const key of keys) {
      for (const template of this.byKey.get(key) ?? []) {
        if (best !== undefined && template.weight <= best.template.weight) break;
        const values = template.values(text);
        if (values === undefined || (strict && template.beginsOddly(values))) continue;
        best = { template, values };
        break;
      }
    }
    return best;
  }

  private value(text: string, depth: number): string {
    if (LIST.test(text)) return text.replaceAll(", ", "、").replaceAll(" and ", " 和 ");
    return this.translated(text, depth) ?? text;
  }

  /** The parts of a text, translated; undefined if no part is known. */
  private divided(text: string, depth: number): string | undefined {
    const [first, ...others] = SEPARATORS;
    const start = this.at(text, first, depth) ?? this.beforeItsEnd(text, depth);
    return others.reduce<string | undefined>((found, other) => found ?? this.at(text, other, depth), start);
  }

  /** The translation of a text that ends with parentheses or a full stop. */
  private beforeItsEnd(text: string, depth: number): string | undefined {
    if (text.endsWith(".")) {
      const inner = this.translated(text.slice(0, -1), depth + 1);
      return inner === undefined ? undefined : `${inner}。`;
    }
    const start = text.indexOf("(");
    if (!text.endsWith(")") || start < 0 || (start > 0 && text[start - 1] !== " ")) return undefined;
    const [before, inner] = [text.slice(0, start).replace(/ +$/, ""), text.slice(start + 1, -1)];
    const known = [this.translated(before, depth + 1), this.translated(inner, depth + 1)];
    return known.every((part) => part === undefined) ? undefined : `${known[0] ?? before}（${known[1] ?? inner}）`;
  }

  /** The parts of a text between separators, translated; undefined if not enough of them are known. */
  private at(text: string, [separator, mark]: readonly [string, string], depth: number): string | undefined {
    const parts = text.split(separator);
    if (parts.length === 1) return undefined;
    const others = parts.slice(1, MOST_PARTS);
    if (parts.length > MOST_PARTS) others.push(parts.slice(MOST_PARTS).join(separator));
    const start = this.translated(parts[0]!, depth + 1);
    const rest = others.map((part) => {
      // A template may begin with the separator, as in "; these do not reach each other: {}".
      const whole = this.matched(separator + part, depth + 1, true);
      return { part, whole, end: whole === undefined ? this.translated(part, depth + 1) : undefined };
    });
    const known = [start, ...rest.map(({ whole, end }) => whole ?? end)].map((part) => part !== undefined);
    if (!(separator === ", " ? known.every(Boolean) : known.some(Boolean))) return undefined;
    return (start ?? parts[0]!) + rest.map(({ part, whole, end }) => whole ?? mark + (end ?? part)).join("");
  }
}

/** Memoizes the last calls of a function, because lists are rendered again with each event. */
export function remembering(translate: (text: string) => string): (text: string) => string {
  const known = new Map<string, string>();
  return (text) => {
    const found = known.get(text);
    if (found !== undefined) return found;
    if (known.size >= MOST_REMEMBERED) known.clear();
    const translation = translate(text);
    known.set(text, translation);
    return translation;
  };
}
