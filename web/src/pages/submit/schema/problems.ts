/** Finds the form's field for a problem that the server reports. */
import type { FieldProblem } from "../../../api/problem";
import type { Field } from "./schema";

/** Problems by the field (with dots) that shows them; "" holds problems that no field shows. */
export function placed(problems: readonly FieldProblem[], root: Field): ReadonlyMap<string, readonly string[]> {
  const found = new Map<string, string[]>();
  for (const { field, problem } of problems) {
    const place = nearest(field === "" ? [] : field.split("."), root);
    const rest = field.slice(place.length).replace(/^\./, "");
    // The message is prefixed with the name of a part that has no input, such as the second of several files.
    const said = rest === "" || /^\d+$/.test(rest) ? problem : `${rest}: ${problem}`;
    found.set(place, [...(found.get(place) ?? []), said]);
  }
  return found;
}

/** The deepest field on the path that has its own input. */
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
