/** Puts what events tell into answers that are there. */
import type { QueryClient, QueryKey } from "@tanstack/react-query";

/**
 * Change the answer to a query, if there is one. It is no fresher for that: what was out of date beyond this stays so,
 * and is asked for again when somebody looks.
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

/** The same, and once more when an answer that is on its way has come: it may be older than this. `change` may be made twice. */
export function writeThrough<T>(client: QueryClient, queryKey: QueryKey, change: (old: T) => T): void {
  const query = client.getQueryCache().find<T>({ queryKey, exact: true });
  if (query?.state.fetchStatus === "fetching") {
    void query.promise?.then(() => write(client, queryKey, change), () => undefined);
  }
  write(client, queryKey, change);
}
