/**
 * Reads a JSON schema as pydantic writes it into the fields of a form.
 *
 * react-jsonschema-form was tried and left: its core cannot be bundled without ajv, which compiles validators by
 * `new Function` (our Content-Security-Policy forbids it), it is 127 kB compressed without its inputs, and it draws
 * every optional field, `anyOf: [T, null]`, as a choice between two nameless alternatives.
 */

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  type?: string;
  format?: string;
  title?: string;
  description?: string;
  default?: unknown;
  const?: unknown;
  enum?: readonly unknown[];
  anyOf?: readonly Schema[];
  properties?: Record<string, Schema>;
  required?: readonly string[];
  items?: Schema;
  prefixItems?: readonly Schema[];
  additionalProperties?: boolean | Schema;
  /** Of these fields exactly one is to be given. */
  "x-exactly-one"?: readonly string[];
}

/**
 * What a field is filled in with: `strings` one a line, `rows` a list of objects, `yaml` whatever has no input of its
 * own (mappings, pairs of numbers), written in YAML's short form.
 */
export type Kind = "text" | "number" | "boolean" | "choice" | "path" | "paths" | "strings" | "object" | "rows" | "yaml";

export interface Field {
  /** Keys from the whole job to it. */
  path: readonly string[];
  kind: Kind;
  label: string;
  help: string;
  isRequired: boolean;
  /** Whether null is a value of its own: the field is off. */
  isNullable: boolean;
  fallback: unknown;
  choices: readonly string[];
  /** Of an object, or of one row. */
  fields: readonly Field[];
  /** Names of fields of which exactly one is given. */
  exactlyOne: readonly string[];
}

/** The fields of a job of one kind; `kind` itself is chosen elsewhere. */
export function readSchema(schema: Schema): Field {
  return field(schema, schema, [], "", true);
}

function field(root: Schema, written: Schema, path: readonly string[], name: string, isRequired: boolean): Field {
  const { schema, isNullable } = resolve(root, written);
  const kind = kindOf(root, schema);
  const inner = kind === "rows" ? resolve(root, schema.items ?? {}).schema : schema;
  return {
    path,
    kind,
    label: labelOf(name, written.title),
    help: plain(written.description ?? schema.description ?? ""),
    isRequired,
    isNullable,
    fallback: written.default,
    choices: (schema.enum ?? []).map(String),
    exactlyOne: schema["x-exactly-one"] ?? [],
    fields:
      kind !== "object" && kind !== "rows"
        ? []
        : Object.entries(inner.properties ?? {})
            .filter(([key]) => path.length > 0 || key !== "kind")
            .map(([key, one]) =>
              field(root, one, kind === "rows" ? [key] : [...path, key], key, inner.required?.includes(key) ?? false),
            ),
  };
}

/** Follow references, and take null out of the alternatives. */
function resolve(root: Schema, schema: Schema): { schema: Schema; isNullable: boolean } {
  if (schema.$ref !== undefined) {
    const target = root.$defs?.[schema.$ref.split("/").at(-1)!] ?? {};
    return { schema: target, isNullable: false };
  }
  const others = schema.anyOf?.filter((one) => one.type !== "null");
  if (others === undefined) return { schema, isNullable: false };
  const isNullable = others.length < schema.anyOf!.length;
  const only = others.length === 1 ? resolve(root, others[0]!).schema : schema;
  return { schema: only, isNullable };
}

function kindOf(root: Schema, schema: Schema): Kind {
  if (schema.enum !== undefined || schema.const !== undefined) return "choice";
  switch (schema.type) {
    case "string":
      return schema.format === "path" ? "path" : "text";
    case "integer":
    case "number":
      return "number";
    case "boolean":
      return "boolean";
    case "object":
      return schema.properties === undefined ? "yaml" : "object";
    case "array": {
      if (schema.items === undefined) return "yaml";
      const item = resolve(root, schema.items).schema;
      if (item.properties !== undefined) return "rows";
      if (item.type !== "string") return "yaml";
      return item.format === "path" ? "paths" : "strings";
    }
    default:
      return "yaml";
  }
}

/** A title that somebody wrote, or the field's name as a sentence begins; pydantic's own has capitals everywhere. */
function labelOf(name: string, title: string | undefined): string {
  const own = name.replaceAll("_", " ").replace(/\b[a-z]/g, (letter) => letter.toUpperCase());
  if (title !== undefined && title !== own && name !== "") return title;
  const words = name.replace(/_s$/, " (s)").replace(/_bytes$/, " (bytes)").replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** Docstrings mark code with double backticks. */
function plain(text: string): string {
  return text.replaceAll("``", "").replace(/\s+/g, " ").trim();
}

/** The field that a path leads to; undefined where the schema has none. */
export function find(root: Field, path: readonly string[]): Field | undefined {
  let found: Field | undefined = root;
  for (const key of path) found = found?.fields.find((one) => one.path.at(-1) === key);
  return found;
}

/** What differs from the defaults; undefined where nothing does. */
export function pruned(value: unknown, by: Field): unknown {
  if (by.kind !== "object" || typeof value !== "object" || value === null) {
    return same(value, by.fallback) ? undefined : value;
  }
  const kept: Record<string, unknown> = {};
  for (const [key, one] of Object.entries(value)) {
    const inner = by.fields.find((candidate) => candidate.path.at(-1) === key);
    const rest = inner === undefined ? one : pruned(one, inner);
    if (rest !== undefined) kept[key] = rest;
  }
  return Object.keys(kept).length === 0 && !by.isRequired && !by.isNullable ? undefined : kept;
}

function same(a: unknown, b: unknown): boolean {
  return JSON.stringify(a ?? null) === JSON.stringify(b ?? null);
}
