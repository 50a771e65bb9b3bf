/** Queries of the operator's page; `applyEvents` decides when each is out of date. */
import { queryOptions } from "@tanstack/react-query";

import { api, body } from "../../api/client";
import { ADMIN } from "../../api/queries";

export const queue = queryOptions({
  queryKey: [...ADMIN, "queue"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/queue", { signal }))).jobs,
});

/** Deployments that are up. */
export const deployments = queryOptions({
  queryKey: [...ADMIN, "deployments"],
  queryFn: async ({ signal }) =>
    (await body(api.GET("/api/v1/deployments", { signal, params: { query: { limit: 500 } } }))).deployments,
});

/** Not refreshed by events, because only this page changes keys. */
export const keys = queryOptions({
  queryKey: ["keys"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/keys", { signal }))).keys,
});
