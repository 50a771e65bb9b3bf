/** The search parameters of the page of models. */
import type { CatalogueEntry } from "../../api/types";

export const SOURCES = ["operator", "job", "upload", "hub", "folder"] as const satisfies readonly CatalogueEntry["source"][];

export interface ModelsSearch {
  /** Whether to show deployments that ended, instead of those that are up. */
  show?: "over";
  /** Whether the form for a deployment is open; the other parameters fill it in. */
  new?: boolean;
  job?: string;
  artifact?: string;
  path?: string;
  /** Only models of this source. */
  source?: CatalogueEntry["source"];
}

export function modelsSearch(search: Record<string, unknown>): ModelsSearch {
  const text = (name: "job" | "artifact" | "path") => (typeof search[name] === "string" ? { [name]: search[name] } : {});
  const source = SOURCES.find((one) => one === search.source);
  return {
    ...(search.show === "over" && { show: "over" as const }),
    ...(search.new === true && { new: true }),
    ...text("job"),
    ...text("artifact"),
    ...text("path"),
    ...(source !== undefined && { source }),
  };
}
