/** What the pages ask the server for, each under the key that live events refresh it by. */
import { infiniteQueryOptions, queryOptions } from "@tanstack/react-query";

import { api, body } from "./client";
import type { JobState, PoolEvent } from "./types";

export const status = queryOptions({
  queryKey: ["status"],
  queryFn: ({ signal }) => body(api.GET("/api/v1/status", { signal })),
});

export const contributors = queryOptions({
  queryKey: ["contributors"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/contributors", { signal }))).contributors,
});

const JOBS_PER_PAGE = 50;
const EVENTS_PER_PAGE = 500;

export function jobs(state: JobState | undefined) {
  return infiniteQueryOptions({
    queryKey: ["jobs", state ?? "all"],
    queryFn: ({ signal, pageParam }) =>
      body(
        api.GET("/api/v1/jobs", {
          signal,
          params: {
            query: {
              limit: JOBS_PER_PAGE,
              ...(state !== undefined && { state: [state] }),
              ...(pageParam !== null && { cursor: pageParam }),
            },
          },
        }),
      ),
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
}

export function job(id: string) {
  return queryOptions({
    queryKey: ["job", id],
    queryFn: ({ signal }) => body(api.GET("/api/v1/jobs/{job_id}", { signal, params: { path: { job_id: id } } })),
  });
}

export function metrics(id: string) {
  return queryOptions({
    queryKey: ["job", id, "metrics"],
    queryFn: async ({ signal }) => {
      const params = { path: { job_id: id } };
      return (await body(api.GET("/api/v1/jobs/{job_id}/metrics", { signal, params }))).metrics;
    },
  });
}

/** All events of a job but its steps, which are in its metrics. */
export function log(id: string) {
  return queryOptions({
    queryKey: ["job", id, "log"],
    queryFn: async ({ signal }) => {
      const kept: PoolEvent[] = [];
      for (let after = 0; ; ) {
        const params = { path: { job_id: id }, query: { after, limit: EVENTS_PER_PAGE } };
        const page = await body(api.GET("/api/v1/jobs/{job_id}/events", { signal, params }));
        kept.push(...page.events.filter((event) => event.kind !== "step"));
        if (page.events.length < EVENTS_PER_PAGE) return kept;
        after = page.next_after;
      }
    },
  });
}

export function artifacts(id: string) {
  return queryOptions({
    queryKey: ["job", id, "artifacts"],
    queryFn: async ({ signal }) => {
      const params = { path: { job_id: id } };
      return (await body(api.GET("/api/v1/jobs/{job_id}/artifacts", { signal, params }))).artifacts;
    },
  });
}

/** One artifact with its files. */
export function artifact(id: string, name: string) {
  return queryOptions({
    queryKey: ["job", id, "artifacts", name],
    queryFn: ({ signal }) => {
      const params = { path: { job_id: id, name } };
      return body(api.GET("/api/v1/jobs/{job_id}/artifacts/{name}", { signal, params }));
    },
  });
}

/** What the operator's page asks for, by their first key: all of it follows from machines, jobs and deployments. */
export const OPERATIONS = ["operations"] as const;

export const invites = queryOptions({
  queryKey: ["invites"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/invites", { signal }))).invites,
});
