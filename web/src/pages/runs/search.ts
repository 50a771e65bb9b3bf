/** Search parameters of the list of jobs and of the comparison, so that a link reproduces the view. */
import type { JobFilter } from "../../api/queries";
import { jobSearch, jobsSearch, type JobSearch } from "../job/search";
import { isColumn, type ColumnKey } from "./columns";

export interface RunsSearch extends JobFilter {
  /** Columns beside the name, separated by commas; default: those of `defaultColumns`. */
  columns?: string | undefined;
  /** Column by which the jobs are sorted, with "-" before it for descending order; default: newest first. */
  sort?: string | undefined;
  /** Column whose values make groups. */
  by?: string | undefined;
}

const MOST_COLUMNS = 40;

export function runsSearch(search: Record<string, unknown>): RunsSearch {
  const columns = columnsIn(typeof search.columns === "string" ? search.columns : "");
  const { sort, by } = search;
  return {
    ...jobsSearch(search),
    ...(columns.length > 0 && { columns: columns.join(",") }),
    ...(typeof sort === "string" && isColumn(sort.replace(/^-/, "")) && { sort }),
    ...(typeof by === "string" && isColumn(by) && { by }),
  };
}

export function columnsIn(text: string): ColumnKey[] {
  return [...new Set(text.split(","))].filter(isColumn).slice(0, MOST_COLUMNS);
}

export function sortIn(text: string | undefined): { column: ColumnKey; isDescending: boolean } | undefined {
  if (text === undefined) return undefined;
  return { column: text.replace(/^-/, "") as ColumnKey, isDescending: text.startsWith("-") };
}

/** Maximum number of jobs in one comparison, as in `share_compute_api.schemas.labels`. */
export const MOST_COMPARED = 20;

export interface CompareSearch extends Pick<JobSearch, "curve" | "scale" | "smooth" | "steps"> {
  /** Ids of the jobs, separated by commas. */
  jobs?: string | undefined;
  /** Ids of the jobs whose curves are hidden. */
  hidden?: string | undefined;
  /** Whether the axis covers all values; otherwise outliers are cut off. */
  outliers?: true | undefined;
  /** The result on the last of the parallel axes. */
  result?: string | undefined;
  /** Fields of the parallel axes, separated by commas. */
  axes?: string | undefined;
}

export function compareSearch(search: Record<string, unknown>): CompareSearch {
  const { curve, scale, smooth, steps } = jobSearch(search);
  const texts = (["jobs", "hidden", "result", "axes"] as const).flatMap((name) => {
    const value = search[name];
    return typeof value === "string" && value !== "" ? [[name, value]] : [];
  });
  return {
    ...(curve !== undefined && { curve }),
    ...(scale !== undefined && { scale }),
    ...(smooth !== undefined && { smooth }),
    ...(steps !== undefined && { steps }),
    ...(search.outliers === true && { outliers: true as const }),
    ...Object.fromEntries(texts),
  };
}

export function idsIn(text: string | undefined): string[] {
  return [...new Set((text ?? "").split(","))].filter((id) => id !== "");
}
