/** Writes data of events into cached responses. */
import type { QueryClient, QueryKey } from "@tanstack/react-query";

/**
 * Change the cached response to a query, if there is one. This does not make the response fresher: an outdated response
 * stays outdated, and is refetched when a page shows it.
 */
export function write<T>(client: QueryClient, queryKey: QueryKey, change: (old: T) => T): void {
  const query = client.getQueryCache().find<T>({ queryKey, exact: true });
  const old = query?.state.data;
  if (query === undefined || old === undefined) return;
  const { dataUpdatedAt, isInvalidated } = query.state;
  const fresh = change(old);
  if (fresh === old) return;
  client.setQueryData(queryKey, fresh, { updatedAt: dataUpdatedAt });
  if (isInvalidated) query.invalidate();
}

/**
 * Change the response now, and again after a running request, whose response may be older. `change` may thus run twice.
 */
export function writeThrough<T>(client: QueryClient, queryKey: QueryKey, change: (old: T) => T): void {
  const query = client.getQueryCache().find<T>({ queryKey, exact: true });
  if (query?.state.fetchStatus === "fetching") {
    void query.promise?.then(() => write(client, queryKey, change), () => undefined);
  }
  write(client, queryKey, change);
}
