/** Applies events to the data that pages have loaded, and refetches only data that events do not contain. */
import type { InfiniteData, QueryClient } from "@tanstack/react-query";

import {
  artifacts,
  catalogue,
  checkpoints,
  contributors,
  deployment,
  deploymentLog,
  deploymentStatus,
  figures,
  invites,
  job,
  log,
  machine,
  machineHistory,
  metrics,
  MOST_POINTS,
  ADMIN,
  pictures,
  servedModels,
} from "../queries";
import type { DeploymentNews, Figures, Job, JobPage, JobState, Metric, ClusterEvent } from "../types";
import { ClusterCacheUpdater } from "./clusterEvents";
import { Refresher } from "./refresher";
import { write, writeThrough } from "./write";

/** Kinds of events that change the operator's page; a job's place in the queue depends on its state. */
const OPERATORS = new Set(["alerts", "contributor", "deployment", "state"]);
/** Kinds of job events after which the job's row in the list is out of date. */
const LISTED = new Set(["state", "started", "rows", "trials", "labelled"]);
/** Kinds of events that change the comparison of jobs: their results, states and labels. */
const COMPARED = new Set(["step", "validated", "state", "labelled", "deleted"]);
/** Kinds of events that add models to the catalogue or remove some. */
const MODELS = new Set(["artifact", "state", "deleted"]);
/** Minimum time between refetches of data that changes all the time, such as totals of machines and lists of results. */
const SUMS_MS = 3000;
/** Minimum time between refetches of a step's timeline, which is expensive for the server. */
const LAYOUT_MS = 10_000;

interface Helpers {
  refresher: Refresher;
  updater: ClusterCacheUpdater;
}

/** Kinds of events that change the trials of a sweep. */
const TRIALS = new Set(["trial", "state", "validated", "deleted"]);

const helpers = new WeakMap<QueryClient, Helpers>();

function helpersOf(client: QueryClient): Helpers {
  let known = helpers.get(client);
  if (known === undefined) {
    const refresher = new Refresher(client);
    known = { refresher, updater: new ClusterCacheUpdater(client, refresher) };
    helpers.set(client, known);
  }
  return known;
}

export function applyEvents(client: QueryClient, events: ClusterEvent[]): void {
  const { refresher, updater } = helpersOf(client);
  // Not Map.groupBy, which Node 20 lacks.
  const byJob = new Map<string | null, ClusterEvent[]>();
  for (const event of events) byJob.set(event.job_id, [...(byJob.get(event.job_id) ?? []), event]);
  for (const [id, some] of byJob) {
    if (id !== null) applyToJob(client, refresher, id, some);
  }
  applyToJobLists(client, byJob);
  // Events of trials do not contain the id of their sweep.
  if (events.some((event) => TRIALS.has(event.kind))) refresher.refresh(["trials"]);
  if (events.some((event) => COMPARED.has(event.kind))) refresher.refresh(["comparison"], { pauseMs: SUMS_MS });
  if (events.some((event) => MODELS.has(event.kind))) refresher.refresh(catalogue.queryKey, { pauseMs: SUMS_MS });
  updater.apply(events);
  applyToMachines(client, refresher, events);
  if (events.some((event) => event.kind === "contributor")) {
    refresher.refresh(contributors.queryKey);
    // A machine that joins uses an invite.
    refresher.refresh(invites.queryKey);
  }
  if (events.some((event) => OPERATORS.has(event.kind))) refresher.refresh(ADMIN);
  const ofDeployments = events.filter((event) => event.kind === "deployment");
  if (ofDeployments.length > 0) applyToDeployments(client, refresher, ofDeployments);
  if (events.some((event) => event.job_id !== null && LISTED.has(event.kind))) refresher.refresh(["jobs"]);
  else if (events.some((event) => event.kind === "validated")) refresher.refresh(["jobs"], { pauseMs: SUMS_MS });
}

function applyToDeployments(client: QueryClient, refresher: Refresher, events: ClusterEvent[]): void {
  const news = events.map((event) => event.data as unknown as DeploymentNews);
  for (const id of new Set(news.map((one) => one.id))) {
    const some = events.filter((event) => event.data.id === id);
    writeThrough<ClusterEvent[]>(client, deploymentLog(id).queryKey, (old) => mergeLog(old, some));
  }
  for (const key of new Set(news.flatMap((one) => [one.id, one.name]))) {
    refresher.refresh(deployment(key).queryKey, { exact: true });
    refresher.refresh(deploymentStatus(key).queryKey);
  }
  refresher.refresh(["deployments"]);
  // Only changes of a state add or remove models.
  if (news.some((one) => one.state !== one.from)) refresher.refresh(servedModels.queryKey);
}

/** Replace the figures of a deployment. */
export function applyFigures(client: QueryClient, fresh: Figures): void {
  client.setQueryData(figures.queryKey, (old) => ({ ...old, [fresh.name]: fresh }));
}

function applyToJob(client: QueryClient, refresher: Refresher, id: string, events: ClusterEvent[]): void {
  const change = changeOfJob(events);
  write<Job>(client, job(id).queryKey, (old) => advanced(old, change));
  writeThrough<Metric[]>(client, metrics(id).queryKey, (old) => mergeMetrics(old, events));
  writeThrough<ClusterEvent[]>(client, log(id).queryKey, (old) => mergeLog(old, events));
  if (events.some((event) => event.kind === "artifact")) refresher.refresh(artifacts(id).queryKey);
  if (events.some((event) => event.kind === "validated")) refresher.refresh(pictures(id).queryKey);
  if (events.some((event) => event.kind === "checkpoint")) refresher.refresh(checkpoints(id).queryKey);
  // The timeline uses the layer times that were measured so far.
  if (events.some((event) => event.kind === "layers-timed")) refresher.refresh(["job", id, "timeline"], { pauseMs: LAYOUT_MS });
  if (events.some(changesJob)) refresher.refresh(job(id).queryKey, { exact: true });
}

/** Apply a batch of events of all jobs in one pass over the lists. */
function applyToJobLists(client: QueryClient, byJob: Map<string | null, ClusterEvent[]>): void {
  const changes = new Map([...byJob].map(([id, events]) => [id, changeOfJob(events)]));
  if (![...changes.values()].some((change) => change.progress !== undefined || change.state !== undefined)) return;
  for (const { queryKey } of client.getQueryCache().findAll({ queryKey: ["jobs"] })) {
    write<InfiniteData<JobPage>>(client, queryKey, (old) => {
      const pages = old.pages.map((page) => {
        const jobs = page.jobs.map((one) => advanced(one, changes.get(one.id) ?? {}));
        return jobs.some((one, place) => one !== page.jobs[place]) ? { ...page, jobs } : page;
      });
      return pages.some((page, place) => page !== old.pages[place]) ? { ...old, pages } : old;
    });
  }
}

/** Apply events to the pages of single machines: append to the history, and refetch the figures. */
function applyToMachines(client: QueryClient, refresher: Refresher, events: ClusterEvent[]): void {
  for (const query of client.getQueryCache().findAll({ queryKey: ["contributor"] })) {
    const [, id, part] = query.queryKey as [string, string, string?];
    if (part !== undefined) continue;
    const own = events.filter((event) => event.contributor_id === id);
    const held = client.getQueryData(machine(id).queryKey)?.held?.job_id ?? null;
    const ofJob = held === null ? [] : events.filter((event) => event.job_id === held);
    if (!query.isActive()) {
      // The page is not open, so it refetches everything when it is opened again.
      if (own.length + ofJob.length > 0) void client.invalidateQueries({ queryKey: ["contributor", id], refetchType: "none" });
      continue;
    }
    if (own.length > 0) {
      writeThrough<ClusterEvent[]>(client, machineHistory(id).queryKey, (old) => mergeLog(old, own));
      refresher.refresh(machine(id).queryKey, { exact: true });
    }
    if (own.length > 0 || ofJob.some((event) => event.kind === "step")) {
      refresher.refresh(["contributor", id, "work"], { pauseMs: SUMS_MS });
    }
    if (ofJob.some((event) => event.kind === "measured")) refresher.refresh(["contributor", id, "busy"]);
  }
}

/** Whether the event changes more of the job's row than its progress. */
function changesJob(event: ClusterEvent): boolean {
  return event.job_id !== null && !["step", "validated", "sampled", "note", "artifact"].includes(event.kind);
}

interface JobChange {
  progress?: Pick<Job, "step" | "loss" | "tokens_per_s">;
  state?: Pick<Job, "state" | "reason" | "attempt">;
}

function changeOfJob(events: ClusterEvent[]): JobChange {
  const change: JobChange = {};
  const progress = latestProgress(events);
  if (progress !== undefined) change.progress = progress;
  const moved = events.findLast((event) => event.kind === "state");
  if (moved !== undefined) {
    const { state, reason } = moved.data as { state: JobState; reason: string };
    change.state = { state, reason, attempt: moved.attempt ?? 1 };
  }
  return change;
}

/** Return the job after a change; the same object if nothing changes. */
function advanced(old: Job, { progress, state }: JobChange): Job {
  const isNewer = progress !== undefined && old.step <= progress.step;
  if (!isNewer && state === undefined) return old;
  return { ...old, ...(isNewer && progress), ...state };
}

function latestProgress(events: ClusterEvent[]): Pick<Job, "step" | "loss" | "tokens_per_s"> | undefined {
  const last = events.findLast((event) => event.kind === "step");
  if (last === undefined) return undefined;
  const { step, loss, tokens_per_s } = last.data as { step: number; loss: number; tokens_per_s: number };
  return { step, loss, tokens_per_s };
}

/** Append measured steps. A resumed attempt measures some steps again; the later measurement replaces the earlier. */
export function mergeMetrics(known: Metric[], events: ClusterEvent[]): Metric[] {
  const fresh = events.flatMap((event): Metric[] => {
    const { step, split, ...data } = event.data as { step: number; split?: Metric["split"] };
    if (event.kind === "step") return [{ split: "train", step, data }];
    if (event.kind === "validated" && split !== undefined) return [{ split, step, data }];
    return [];
  });
  if (fresh.length === 0) return known;
  // The usual case: the new steps follow the known ones, so no sort is needed.
  const last = known.at(-1)?.step ?? -1;
  if (fresh.every((metric, place) => metric.step > (fresh[place - 1]?.step ?? last))) return thinned([...known, ...fresh]);
  const name = (metric: Metric) => `${metric.split} ${metric.step}`;
  const replaced = new Set(fresh.map(name));
  return thinned([...known.filter((metric) => !replaced.has(name(metric))), ...fresh].sort((a, b) => a.step - b.step));
}

/** Limit the points of a page that stays open for days to a few times those of a newly opened page. */
function thinned(metrics: Metric[]): Metric[] {
  const train = metrics.filter((metric) => metric.split === "train");
  if (train.length <= 3 * MOST_POINTS) return metrics;
  const dropped = new Set(train.slice(0, -MOST_POINTS).filter((_, index) => index % 2 === 1));
  return metrics.filter((metric) => !dropped.has(metric));
}

/** Append events to the log. Steps are left out, since the curves show them. */
export function mergeLog(known: ClusterEvent[], events: ClusterEvent[]): ClusterEvent[] {
  const last = known.at(-1)?.seq ?? 0;
  const fresh = events.filter((event) => event.kind !== "step" && event.seq > last);
  return fresh.length === 0 ? known : [...known, ...fresh];
}
