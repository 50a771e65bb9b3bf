/** What the pages ask the server for, each under the key that live events refresh it by. */
import { infiniteQueryOptions, queryOptions } from "@tanstack/react-query";

import { api, body } from "./client";
import type { JobKind, JobState, PoolEvent } from "./types";

export const status = queryOptions({
  queryKey: ["status"],
  queryFn: ({ signal }) => body(api.GET("/api/v1/status", { signal })),
});

export const contributors = queryOptions({
  queryKey: ["contributors"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/contributors", { signal }))).contributors,
});

const JOBS_PER_PAGE = 50;
const EVENTS_PER_PAGE = 5000;
/** Points of a curve, more than a screen is wide: of longer runs the server tells those that give the curve its shape. */
export const MOST_POINTS = 2000;

export interface JobFilter {
  state?: JobState | undefined;
  kind?: JobKind | undefined;
  /** Part of the name. */
  name?: string | undefined;
}

export function jobs({ state, kind, name }: JobFilter = {}) {
  return infiniteQueryOptions({
    queryKey: ["jobs", state ?? "all", kind ?? "all", name ?? ""],
    queryFn: ({ signal, pageParam }) =>
      body(
        api.GET("/api/v1/jobs", {
          signal,
          params: {
            query: {
              limit: JOBS_PER_PAGE,
              ...(state !== undefined && { state: [state] }),
              ...(kind !== undefined && { kind }),
              ...(name !== undefined && { name }),
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
      const params = { path: { job_id: id }, query: { most: MOST_POINTS } };
      return (await body(api.GET("/api/v1/jobs/{job_id}/metrics", { signal, params }))).metrics;
    },
  });
}

/** The metrics of a stretch of steps, both ends included: of a long run they are told closer together. */
export function metricsBetween(id: string, first: number, last: number) {
  return queryOptions({
    queryKey: ["job", id, "metrics", first, last],
    queryFn: async ({ signal }) => {
      const query = { after_step: Math.max(0, first - 1), until_step: last, most: MOST_POINTS };
      const params = { path: { job_id: id }, query };
      return (await body(api.GET("/api/v1/jobs/{job_id}/metrics", { signal, params }))).metrics;
    },
  });
}

/** One step of the job's plan, cell by cell; `epoch` and `attempt` name the plan. */
export function timeline(id: string, attempt: number, epoch: number) {
  return queryOptions({
    queryKey: ["job", id, "timeline", attempt, epoch],
    queryFn: ({ signal }) => body(api.GET("/api/v1/jobs/{job_id}/timeline", { signal, params: { path: { job_id: id } } })),
  });
}

export function checkpoints(id: string) {
  return queryOptions({
    queryKey: ["job", id, "checkpoints"],
    queryFn: async ({ signal }) => {
      const params = { path: { job_id: id } };
      return (await body(api.GET("/api/v1/jobs/{job_id}/checkpoints", { signal, params }))).checkpoints;
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
        const query = { after, limit: EVENTS_PER_PAGE, without: ["step"] };
        const params = { path: { job_id: id }, query };
        const page = await body(api.GET("/api/v1/jobs/{job_id}/events", { signal, params }));
        kept.push(...page.events);
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

export const invites = queryOptions({
  queryKey: ["invites"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/invites", { signal }))).invites,
});
