/** What the cluster page keeps in its address. */
export const SORTS = ["joined", "name", "state", "work", "speed", "memory", "link", "island"] as const;
export type Sort = (typeof SORTS)[number];

export interface ClusterSearch {
  view?: "table";
  /** Part of a name, an owner, a device, a state or a job. */
  q?: string;
  sort?: Sort;
  desc?: true;
  /** Counted from 2: the first page needs no number. */
  page?: number;
  /** Also those that left or were lost. */
  gone?: true;
  /** Id of the island that is open. */
  island?: string;
}

export function clusterSearch(search: Record<string, unknown>): ClusterSearch {
  const sort = SORTS.find((known) => known === search.sort);
  const page = Number(search.page);
  return {
    ...(search.view === "table" && { view: "table" as const }),
    ...((typeof search.q === "string" || typeof search.q === "number") && search.q !== "" && { q: String(search.q) }),
    ...(sort !== undefined && sort !== "joined" && { sort }),
    ...(search.desc === true && { desc: true as const }),
    ...(Number.isInteger(page) && page > 1 && { page }),
    ...(search.gone === true && { gone: true as const }),
    ...(typeof search.island === "string" && search.island !== "" && { island: search.island }),
  };
}
