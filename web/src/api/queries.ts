/** What the pages ask the server for, each under the key that live events refresh it by. */
import { infiniteQueryOptions, queryOptions } from "@tanstack/react-query";

import { api, body } from "./client";
import type { Contributor, ContributorList, JobState, PoolEvent, PoolView } from "./types";

export const status = queryOptions({
  queryKey: ["status"],
  queryFn: ({ signal }) => body(api.GET("/api/v1/status", { signal })),
});

export const contributors = queryOptions({
  queryKey: ["contributors"],
  queryFn: async ({ signal }) => {
    const all: Contributor[] = [];
    for (let cursor: string | null = null; ; ) {
      const params: { query: { cursor?: string } } = { query: cursor === null ? {} : { cursor } };
      const page: ContributorList = await body(api.GET("/api/v1/contributors", { signal, params }));
      all.push(...page.contributors);
      cursor = page.next_cursor;
      if (cursor === null) return all;
    }
  },
});

const ISLANDS_MS = 10_000;

/** All machines as a map shows them; live events change single rows of it. */
export const pool = queryOptions({
  queryKey: ["pool"],
  queryFn: ({ signal }) => body(api.GET("/api/v1/pool", { signal })),
  // No event tells when islands that are being worked out are there.
  refetchInterval: ({ state }) => (state.data?.islands.is_current === false ? ISLANDS_MS : false),
});

/** Some machines of the pool, with the islands of all. */
export function machinesOfPool(ids: string[]): Promise<PoolView> {
  return body(api.GET("/api/v1/pool", { params: { query: { machine: ids } } }));
}

export function machine(id: string) {
  return queryOptions({
    queryKey: ["contributor", id],
    queryFn: ({ signal }) =>
      body(api.GET("/api/v1/contributors/{contributor_id}", { signal, params: { path: { contributor_id: id } } })),
  });
}

/** Everything that happened to a machine. */
export function machineHistory(id: string) {
  return queryOptions({
    queryKey: ["contributor", id, "events"],
    queryFn: async ({ signal }) => {
      const all: PoolEvent[] = [];
      for (let after = 0; ; ) {
        const params = { path: { contributor_id: id }, query: { after, limit: EVENTS_PER_PAGE } };
        const page = await body(api.GET("/api/v1/contributors/{contributor_id}/events", { signal, params }));
        all.push(...page.events);
        if (page.events.length < EVENTS_PER_PAGE) return all;
        after = page.next_after;
      }
    },
  });
}

/** What a machine gave. */
export function machineWork(id: string) {
  return queryOptions({
    queryKey: ["contributor", id, "work"],
    queryFn: ({ signal }) =>
      body(api.GET("/api/v1/contributors/{contributor_id}/work", { signal, params: { path: { contributor_id: id } } })),
  });
}

export function machineBusy(id: string, hours: number) {
  return queryOptions({
    queryKey: ["contributor", id, "busy", hours],
    queryFn: async ({ signal }) => {
      const params = { path: { contributor_id: id }, query: { hours } };
      return (await body(api.GET("/api/v1/contributors/{contributor_id}/busy", { signal, params }))).measured;
    },
  });
}

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

export const invites = queryOptions({
  queryKey: ["invites"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/invites", { signal }))).invites,
});
