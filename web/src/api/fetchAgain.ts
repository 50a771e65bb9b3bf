/** Fetches data again after a change that this browser made. */
import type { QueryClient, QueryFilters } from "@tanstack/react-query";

/**
 * Fetch the data of queries again, if a page shows it. A request that is already running may respond with data from
 * before the change. `invalidateQueries` alone would keep this response if it is the query's first.
 */
export async function fetchAgain(client: QueryClient, which: QueryFilters): Promise<void> {
  await client.cancelQueries(which);
  await client.invalidateQueries(which);
}
