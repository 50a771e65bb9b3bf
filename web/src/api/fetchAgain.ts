/** Fetches data again after a change that this browser made. */
import type { QueryClient, QueryFilters } from "@tanstack/react-query";

/**
 * Fetch the data of queries again, if a page shows it. The response to a request that runs already may be older than
 * the change; `invalidateQueries` alone would keep the response if it is the first one of its query.
 */
export async function fetchAgain(client: QueryClient, which: QueryFilters): Promise<void> {
  await client.cancelQueries(which);
  await client.invalidateQueries(which);
}
