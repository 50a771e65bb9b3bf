/** An earlier job as the start of a new one: without defaults, and with uploads by name. */
import type { Job, Upload } from "../../../api/types";
import { written } from "../draft";
import { pruned, type Field } from "../schema/schema";

export function textOf(job: Pick<Job, "id" | "kind" | "spec">, root: Field, known: readonly Pick<Upload, "id" | "folder">[]): string {
  const { kind: _, ...spec } = pruned(job.spec, { ...root, isRequired: true }) as Record<string, unknown>;
  return `# From ${job.id}.\n${written(named({ kind: job.kind, ...spec }, known))}`;
}

/** Replace paths of uploads by their names, because a stored job contains the paths. */
function named(value: unknown, known: readonly Pick<Upload, "id" | "folder">[]): unknown {
  if (Array.isArray(value)) return value.map((one) => named(one, known));
  if (typeof value === "object" && value !== null) {
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, named(one, known)]));
  }
  if (typeof value !== "string") return value;
  const upload = known.find(({ folder }) => value === folder || value.startsWith(`${folder}/`));
  return upload === undefined ? value : `upload:${upload.id}${value.slice(upload.folder.length)}`;
}
