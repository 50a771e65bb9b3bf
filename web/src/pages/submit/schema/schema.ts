/**
 * Converts a JSON schema that pydantic generated to the fields of a form.
 *
 * react-jsonschema-form is not used, for three reasons. Its core needs ajv, which compiles validators with
 * `new Function`; our Content-Security-Policy forbids that. It is 127 kB compressed without its inputs. It draws every
 * optional field, `anyOf: [T, null]`, as a choice between two unnamed alternatives.
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
  oneOf?: readonly Schema[];
  /** The field that selects the schema of `oneOf`. */
  discriminator?: { propertyName: string; mapping?: Readonly<Record<string, string>> };
  properties?: Record<string, Schema>;
  required?: readonly string[];
  items?: Schema;
  prefixItems?: readonly Schema[];
  additionalProperties?: boolean | Schema;
  /** Names of fields of which exactly one must be given. */
  "x-exactly-one"?: readonly string[];
}

/**
 * The input of a field. `strings`: one per line. `rows`: a list of objects. `yaml`: all types without a dedicated input
 * (mappings, pairs of numbers), in YAML's flow style.
 */
export type Kind = "text" | "number" | "boolean" | "choice" | "path" | "paths" | "strings" | "object" | "rows" | "yaml";

export interface Field {
  /** Keys from the root of the job to the field. */
  path: readonly string[];
  kind: Kind;
  label: string;
  help: string;
  isRequired: boolean;
  /** Whether null is a separate value, which turns the field off. */
  isNullable: boolean;
  fallback: unknown;
  choices: readonly string[];
  /** Fields of an object, or of one row. */
  fields: readonly Field[];
  /** Names of fields of which exactly one must be given. */
  exactlyOne: readonly string[];
  /** Name of the field that chooses among alternatives with different fields; "" for other objects. */
  tag: string;
  /** Values of the parent's tag for which the field exists; undefined if it always does. */
  only?: readonly string[];
}

/** The fields of a job of one kind; `kind` itself is chosen outside of the form. */
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
    tag: schema.discriminator?.propertyName ?? "",
    fields:
      kind !== "object" && kind !== "rows"
        ? []
        : schema.discriminator !== undefined
          ? alternatives(root, schema, path, written.default)
        : Object.entries(inner.properties ?? {})
            .filter(([key]) => path.length > 0 || key !== "kind")
            .map(([key, one]) =>
              field(root, one, kind === "rows" ? [key] : [...path, key], key, inner.required?.includes(key) ?? false),
            ),
  };
}

/** The tag of a tagged union, and the fields of all its alternatives, each field once. */
function alternatives(root: Schema, union: Schema, path: readonly string[], fallback: unknown): Field[] {
  const { propertyName: tag, mapping = {} } = union.discriminator!;
  const found = new Map<string, Field>();
  for (const [value, $ref] of Object.entries(mapping)) {
    const { schema } = resolve(root, { $ref });
    for (const [key, written] of Object.entries(schema.properties ?? {})) {
      const one = field(root, written, [...path, key], key, schema.required?.includes(key) ?? false);
      const known = found.get(key);
      if (key === tag) found.set(key, known ?? { ...one, kind: "choice", isRequired: true, fallback: undefined, choices: Object.keys(mapping) });
      // Alternatives may have different defaults; in this case the form shows no default.
      else found.set(key, { ...one, only: [...(known?.only ?? []), value], fallback: known === undefined || same(known.fallback, one.fallback) ? one.fallback : undefined });
    }
  }
  const chosen = typeof fallback === "object" && fallback !== null ? (fallback as Record<string, unknown>)[tag] : undefined;
  const values = [...Object.keys(mapping)].sort((a, b) => Number(b === chosen) - Number(a === chosen));
  return [...found.values()]
    .map((one) => (one.path.at(-1) === tag ? { ...one, choices: values } : one))
    .sort((a, b) => Number(b.path.at(-1) === tag) - Number(a.path.at(-1) === tag));
}

/** Resolve references, and remove null from the alternatives. */
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
  if (schema.discriminator !== undefined) return "object";
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

/** An explicit title, or the field's name in sentence case; pydantic's generated titles are in title case. */
function labelOf(name: string, title: string | undefined): string {
  const own = name.replaceAll("_", " ").replace(/\b[a-z]/g, (letter) => letter.toUpperCase());
  if (title !== undefined && title !== own && name !== "") return title;
  const words = name.replace(/_s$/, " (s)").replace(/_bytes$/, " (bytes)").replaceAll("_", " ");
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** Remove the double backticks that mark code in docstrings. */
function plain(text: string): string {
  return text.replaceAll("``", "").replace(/\s+/g, " ").trim();
}

/** The field at a path; undefined if the schema has none. */
export function find(root: Field, path: readonly string[]): Field | undefined {
  let found: Field | undefined = root;
  for (const key of path) found = found?.fields.find((one) => one.path.at(-1) === key);
  return found;
}

/** Remove defaults from a value; undefined if nothing is left. */
export function pruned(value: unknown, by: Field): unknown {
  if (by.kind !== "object" || typeof value !== "object" || value === null) {
    return same(value, by.fallback) ? undefined : value;
  }
  if (by.tag !== "" && same(value, by.fallback)) return undefined;
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
