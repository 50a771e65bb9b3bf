/** Queries of the operator's page; `applyEvents` decides when each is out of date. */
import { queryOptions } from "@tanstack/react-query";

import { api, body } from "../../api/client";
import { OPERATIONS } from "../../api/queries";

export const alerts = queryOptions({
  queryKey: [...OPERATIONS, "alerts"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/alerts", { signal }))).alerts,
});

export const queue = queryOptions({
  queryKey: [...OPERATIONS, "queue"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/queue", { signal }))).jobs,
});

/** Deployments that are up. */
export const deployments = queryOptions({
  queryKey: [...OPERATIONS, "deployments"],
  queryFn: async ({ signal }) =>
    (await body(api.GET("/api/v1/deployments", { signal, params: { query: { limit: 500 } } }))).deployments,
});

/** Not refreshed by events: only this page changes keys. */
export const keys = queryOptions({
  queryKey: ["keys"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/keys", { signal }))).keys,
});
