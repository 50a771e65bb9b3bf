/** Queries that the pages share, each with the key by which live events refresh it. */
import { infiniteQueryOptions, queryOptions, skipToken } from "@tanstack/react-query";

import { api, body } from "./client";
import {
  ENDED_STATES,
  LIVE_STATES,
  type Contributor,
  type ContributorList,
  type Figures,
  type JobKind,
  type JobState,
  type ClusterEvent,
  type ClusterView,
} from "./types";

/** Fetch all pages of events, from the beginning. */
async function allEvents(
  page: (query: { after: number; limit: number }) => Promise<{ events: ClusterEvent[]; next_after: number }>,
): Promise<ClusterEvent[]> {
  const all: ClusterEvent[] = [];
  for (let after = 0; ; ) {
    const { events, next_after } = await page({ after, limit: EVENTS_PER_PAGE });
    all.push(...events);
    if (events.length < EVENTS_PER_PAGE) return all;
    after = next_after;
  }
}

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

/** All machines in the form that the map needs; live events change single rows. */
export const cluster = queryOptions({
  queryKey: ["cluster"],
  queryFn: ({ signal }) => body(api.GET("/api/v1/cluster", { signal })),
  // No event reports that the islands have been computed, so the query polls.
  refetchInterval: ({ state }) => (state.data?.islands.is_current === false ? ISLANDS_MS : false),
});

/** Some machines of the cluster, with the islands of all machines. */
export function machinesOfCluster(ids: string[]): Promise<ClusterView> {
  return body(api.GET("/api/v1/cluster", { params: { query: { machine: ids } } }));
}

export function machine(id: string) {
  return queryOptions({
    queryKey: ["contributor", id],
    queryFn: ({ signal }) =>
      body(api.GET("/api/v1/contributors/{contributor_id}", { signal, params: { path: { contributor_id: id } } })),
  });
}

/** All events of a machine. */
export function machineHistory(id: string) {
  return queryOptions({
    queryKey: ["contributor", id, "events"],
    queryFn: ({ signal }) =>
      allEvents((query) => {
        const params = { path: { contributor_id: id }, query };
        return body(api.GET("/api/v1/contributors/{contributor_id}/events", { signal, params }));
      }),
  });
}

/** The work that a machine did. */
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

/** Machines measure themselves this often. */
const MEASURED_MS = 10_000;
/** With more machines, the last hour of all machines is fetched less often. */
const MANY = 200;

/** The utilization of a machine in the last hour. */
export function machineUtilization(id: string) {
  return queryOptions({
    queryKey: ["contributor", id, "utilization"],
    queryFn: ({ signal }) =>
      body(api.GET("/api/v1/contributors/{contributor_id}/utilization", { signal, params: { path: { contributor_id: id } } })),
    refetchInterval: MEASURED_MS,
  });
}

/**
 * The present utilization of all machines by id; with `points`, also that many values of each machine over the last
 * hour.
 */
export function utilization(points = 0) {
  return queryOptions({
    queryKey: ["utilization", points],
    queryFn: ({ signal }) => body(api.GET("/api/v1/cluster/utilization", { signal, params: { query: { points } } })),
    refetchInterval: ({ state }) => (points > 0 && Object.keys(state.data?.machines ?? {}).length > MANY ? 6 : 1) * MEASURED_MS,
  });
}

const JOBS_PER_PAGE = 100;
const EVENTS_PER_PAGE = 5000;
/** Maximum number of points of a curve, more than the pixels of a screen's width. The server thins out longer runs. */
export const MOST_POINTS = 2000;

export interface JobFilter {
  state?: JobState | undefined;
  kind?: JobKind | undefined;
  /** Part of the name. */
  name?: string | undefined;
  tag?: string | undefined;
  /** Whether trials of sweeps are among the jobs. */
  trials?: true | undefined;
}

export function jobs({ state, kind, name, tag, trials }: JobFilter = {}) {
  return infiniteQueryOptions({
    queryKey: ["jobs", state ?? "all", kind ?? "all", name ?? "", tag ?? "", trials ?? false],
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
              ...(tag !== undefined && { tag: [tag] }),
              ...(trials !== undefined && { trials }),
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

/** Predictions of the last validation and test. */
export function pictures(id: string) {
  return queryOptions({
    queryKey: ["job", id, "pictures"],
    queryFn: ({ signal }) => body(api.GET("/api/v1/jobs/{job_id}/pictures", { signal, params: { path: { job_id: id } } })),
  });
}

/** Trials of a sweep, best first. */
export function trials(id: string) {
  return queryOptions({
    queryKey: ["trials", id],
    queryFn: ({ signal }) => body(api.GET("/api/v1/jobs/{job_id}/trials", { signal, params: { path: { job_id: id } } })),
  });
}

/** Results of some jobs, and the differences of their job files. */
export function comparison(ids: readonly string[]) {
  return queryOptions({
    queryKey: ["comparison", ...ids],
    queryFn: ({ signal }) => body(api.GET("/api/v1/jobs/compare", { signal, params: { query: { job: [...ids] } } })),
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

/** The metrics of a range of steps, both ends included: denser than those of the whole of a long run. */
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

/** All events of a job except its steps, which are in its metrics. */
export function log(id: string) {
  return queryOptions({
    queryKey: ["job", id, "log"],
    queryFn: ({ signal }) =>
      allEvents((query) => {
        const params = { path: { job_id: id }, query: { ...query, without: ["step"] } };
        return body(api.GET("/api/v1/jobs/{job_id}/events", { signal, params }));
      }),
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

const DEPLOYMENTS_PER_PAGE = 50;

/** Deployments that are up or have ended, newest first. */
export function deployments(which: "up" | "over") {
  return infiniteQueryOptions({
    queryKey: ["deployments", which],
    queryFn: ({ signal, pageParam }) => {
      const state = [...(which === "up" ? LIVE_STATES : ENDED_STATES)];
      const query = { state, limit: DEPLOYMENTS_PER_PAGE, ...(pageParam !== null && { cursor: pageParam }) };
      return body(api.GET("/api/v1/deployments", { signal, params: { query } }));
    },
    initialPageParam: null as string | null,
    getNextPageParam: (page) => page.next_cursor,
  });
}

/** One deployment, by id or name. */
export function deployment(key: string) {
  return queryOptions({
    queryKey: ["deployment", key],
    queryFn: ({ signal }) => body(api.GET("/api/v1/deployments/{deployment}", { signal, params: { path: { deployment: key } } })),
  });
}

/** The status and predictions of each replica; `figures` has the values that change continuously. */
export function deploymentStatus(key: string) {
  return queryOptions({
    queryKey: ["deployment", key, "status"],
    queryFn: async ({ signal }) => {
      const params = { path: { deployment: key } };
      const { replicas } = await body(api.GET("/api/v1/deployments/{deployment}/status", { signal, params }));
      return { replicas, at: new Date().toISOString() };
    },
  });
}

export function deploymentLog(id: string) {
  return queryOptions({
    queryKey: ["deployment", id, "log"],
    queryFn: ({ signal }) =>
      allEvents((query) => {
        const params = { path: { deployment: id }, query };
        return body(api.GET("/api/v1/deployments/{deployment}/events", { signal, params }));
      }),
  });
}

/** The last figures of each deployment, by name; only the event stream sets them. */
export const figures = queryOptions<Record<string, Figures>>({
  queryKey: ["figures"],
  queryFn: skipToken,
  staleTime: Infinity,
  gcTime: Infinity,
});

const PENDING_MS = 2000;
const PENDING_STEP_MS = 500;
const PENDING_MOST_MS = 5000;

/**
 * Models that the key may serve; while folders are being read, the list is refetched every 2 s, and later every 5 s.
 */
export const catalogue = queryOptions({
  queryKey: ["catalogue"],
  queryFn: ({ signal }) => body(api.GET("/api/v1/catalogue", { signal })),
  refetchInterval: ({ state }) =>
    state.data?.models.some((one) => one.is_pending) &&
    Math.min(PENDING_MS + PENDING_STEP_MS * (state.dataUpdateCount - 1), PENDING_MOST_MS),
});

/** Models that clients can call now. */
export const servedModels = queryOptions({
  queryKey: ["models"],
  queryFn: ({ signal }) => readServedModels(signal),
});

/** Return the models that are served now, also those that queries do not know yet. */
export async function readServedModels(signal: AbortSignal) {
  return (await body(api.GET("/v1/models", { signal }))).data;
}

export const uploads = queryOptions({
  queryKey: ["uploads"],
  queryFn: ({ signal }) => body(api.GET("/api/v1/uploads", { signal })),
});

/** The JSON schema of a job kind; it does not change while the server runs. */
export function jobSchema(kind: "train" | "generate" | "embed" | "sparse" | "sweep" | "serve") {
  return queryOptions({
    queryKey: ["schema", kind],
    staleTime: Infinity,
    queryFn: ({ signal }) => body(api.GET("/api/v1/schemas/job", { signal, params: { query: { kind } } })),
  });
}

/** First key of the operator's queries: all of them depend on machines, jobs and deployments. */
export const ADMIN = ["admin"] as const;

export const alerts = queryOptions({
  queryKey: [...ADMIN, "alerts"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/alerts", { signal }))).alerts,
});

export const invites = queryOptions({
  queryKey: ["invites"],
  queryFn: async ({ signal }) => (await body(api.GET("/api/v1/invites", { signal }))).invites,
});
