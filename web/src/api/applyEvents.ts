/** Carries events into what the pages have already loaded, and asks again only for what events do not tell. */
import type { InfiniteData, QueryClient } from "@tanstack/react-query";

import {
  artifacts,
  checkpoints,
  contributors,
  deploymentLog,
  figures,
  job,
  log,
  metrics,
  MOST_POINTS,
  servedModels,
} from "./queries";
import type { DeploymentNews, Figures, Job, JobPage, Metric, PoolEvent } from "./types";

export function applyEvents(client: QueryClient, events: PoolEvent[]): void {
  const byJob = Map.groupBy(events, (event) => event.job_id);
  for (const [id, some] of byJob) {
    if (id !== null) applyToJob(client, id, some);
  }
  // A contributor is leased or released when a job changes its state.
  if (events.some((event) => event.kind === "contributor" || changesJob(event))) {
    void client.invalidateQueries({ queryKey: contributors.queryKey });
  }
  const ofDeployments = events.filter((event) => event.kind === "deployment");
  if (ofDeployments.length > 0) applyToDeployments(client, ofDeployments);
  if (events.some((event) => changesJob(event))) void client.invalidateQueries({ queryKey: ["jobs"] });
}

function applyToDeployments(client: QueryClient, events: PoolEvent[]): void {
  const news = events.map((event) => event.data as unknown as DeploymentNews);
  for (const id of new Set(news.map((one) => one.id))) {
    const some = events.filter((event) => event.data.id === id);
    client.setQueryData(deploymentLog(id).queryKey, (old) => old && mergeLog(old, some));
  }
  const keys = new Set(news.flatMap((one) => [one.id, one.name]));
  void client.invalidateQueries({
    predicate: ({ queryKey: [what, key, part] }) =>
      what === "deployments" || (what === "deployment" && part !== "log" && keys.has(key as string)),
  });
  // Only a state begins or ends that a model answers.
  if (news.some((one) => one.state !== one.from)) {
    void client.invalidateQueries({ queryKey: servedModels.queryKey });
    // Who is leased to whom.
    void client.invalidateQueries({ queryKey: contributors.queryKey });
  }
}

/** Put the figures of a deployment in place of those before. */
export function applyFigures(client: QueryClient, fresh: Figures): void {
  client.setQueryData(figures.queryKey, (old) => ({ ...old, [fresh.name]: fresh }));
}

function applyToJob(client: QueryClient, id: string, events: PoolEvent[]): void {
  const progress = latestProgress(events);
  if (progress !== undefined) {
    const advance = (old: Job) => (old.id === id && old.step <= progress.step ? { ...old, ...progress } : old);
    client.setQueryData(job(id).queryKey, (old) => old && advance(old));
    client.setQueriesData<InfiniteData<JobPage>>({ queryKey: ["jobs"] }, (old) =>
      old && { ...old, pages: old.pages.map((page) => ({ ...page, jobs: page.jobs.map(advance) })) },
    );
  }
  client.setQueryData(metrics(id).queryKey, (old) => old && mergeMetrics(old, events));
  client.setQueryData(log(id).queryKey, (old) => old && mergeLog(old, events));
  if (events.some((event) => event.kind === "artifact")) {
    void client.invalidateQueries({ queryKey: artifacts(id).queryKey });
  }
  if (events.some((event) => event.kind === "checkpoint")) {
    void client.invalidateQueries({ queryKey: checkpoints(id).queryKey });
  }
  if (events.some(changesJob)) void client.invalidateQueries({ queryKey: job(id).queryKey, exact: true });
}

/** Whether the job's own row changed beyond its progress. */
function changesJob(event: PoolEvent): boolean {
  return event.job_id !== null && !["step", "validated", "sampled", "note", "artifact"].includes(event.kind);
}

function latestProgress(events: PoolEvent[]): Pick<Job, "step" | "loss" | "tokens_per_s"> | undefined {
  const last = events.findLast((event) => event.kind === "step");
  if (last === undefined) return undefined;
  const { step, loss, tokens_per_s } = last.data as { step: number; loss: number; tokens_per_s: number };
  return { step, loss, tokens_per_s };
}

/** Put measured steps after those that are known; a resumed attempt measures some steps again, and the later counts. */
export function mergeMetrics(known: Metric[], events: PoolEvent[]): Metric[] {
  const fresh = events.flatMap((event): Metric[] => {
    const { step, split, ...data } = event.data as { step: number; split?: Metric["split"] };
    if (event.kind === "step") return [{ split: "train", step, data }];
    if (event.kind === "validated" && split !== undefined) return [{ split, step, data }];
    return [];
  });
  if (fresh.length === 0) return known;
  const name = (metric: Metric) => `${metric.split} ${metric.step}`;
  const replaced = new Set(fresh.map(name));
  return thinned([...known.filter((metric) => !replaced.has(name(metric))), ...fresh].sort((a, b) => a.step - b.step));
}

/** A page that stays open for days holds no more points than one that is opened anew, give or take a few times as many. */
function thinned(metrics: Metric[]): Metric[] {
  const train = metrics.filter((metric) => metric.split === "train");
  if (train.length <= 3 * MOST_POINTS) return metrics;
  const dropped = new Set(train.slice(0, -MOST_POINTS).filter((_, index) => index % 2 === 1));
  return metrics.filter((metric) => !dropped.has(metric));
}

/** Put events after those that are known; the curves tell the steps, so the log leaves them out. */
export function mergeLog(known: PoolEvent[], events: PoolEvent[]): PoolEvent[] {
  const last = known.at(-1)?.seq ?? 0;
  const fresh = events.filter((event) => event.kind !== "step" && event.seq > last);
  return fresh.length === 0 ? known : [...known, ...fresh];
}
