/** Search parameters of the cluster page. */
export const SORTS = ["joined", "name", "state", "work", "speed", "memory", "link", "island", "use"] as const;
export type Sort = (typeof SORTS)[number];

export interface ClusterSearch {
  view?: "table" | "use";
  /** Part of a name, an owner, a device, a state or a job. */
  q?: string;
  sort?: Sort;
  desc?: true;
  /** Number of the page; absent for the first one. */
  page?: number;
  /** Whether machines that left or were lost are shown, too. */
  gone?: true;
  /** Id of the open island. */
  island?: string;
}

export function clusterSearch(search: Record<string, unknown>): ClusterSearch {
  const sort = SORTS.find((known) => known === search.sort);
  const page = Number(search.page);
  return {
    ...((search.view === "table" || search.view === "use") && { view: search.view as "table" | "use" }),
    ...((typeof search.q === "string" || typeof search.q === "number") && search.q !== "" && { q: String(search.q) }),
    ...(sort !== undefined && sort !== "joined" && { sort }),
    ...(search.desc === true && { desc: true as const }),
    ...(Number.isInteger(page) && page > 1 && { page }),
    ...(search.gone === true && { gone: true as const }),
    ...(typeof search.island === "string" && search.island !== "" && { island: search.island }),
  };
}
