/** Finds the field of the form that shows a problem of the server. */
import type { FieldProblem } from "../../../api/problem";
import type { Field } from "./schema";

/** Problems by the field (with dots) that shows them; "" has those that no field shows. */
export function placed(problems: readonly FieldProblem[], root: Field): ReadonlyMap<string, readonly string[]> {
  const found = new Map<string, string[]>();
  for (const { field, problem } of problems) {
    const place = nearest(field === "" ? [] : field.split("."), root);
    const rest = field.slice(place.length).replace(/^\./, "");
    // The name of a part without an input, such as the second of several files, is put before the message.
    const said = rest === "" || /^\d+$/.test(rest) ? problem : `${rest}: ${problem}`;
    found.set(place, [...(found.get(place) ?? []), said]);
  }
  return found;
}

/** The deepest field on the path that has an input of its own. */
function nearest(path: readonly string[], root: Field): string {
  const steps: string[] = [];
  let at: Field = root;
  for (const key of path) {
    const next: Field | undefined = at.kind === "rows" ? undefined : at.fields.find((one) => one.path.at(-1) === key);
    if (next === undefined) break;
    steps.push(key);
    at = next;
  }
  return steps.join(".");
}
