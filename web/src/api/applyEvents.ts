/** Carries events into what the pages have already loaded, and asks again only for what events do not tell. */
import type { InfiniteData, QueryClient } from "@tanstack/react-query";

import { artifacts, contributors, invites, job, log, metrics, OPERATIONS } from "./queries";
import type { Job, JobPage, Metric, PoolEvent } from "./types";

/** Kinds of events beside those of jobs that change what an operator sees. */
const OPERATORS = new Set(["alerts", "contributor", "deployment"]);

export function applyEvents(client: QueryClient, events: PoolEvent[]): void {
  const byJob = Map.groupBy(events, (event) => event.job_id);
  for (const [id, some] of byJob) {
    if (id !== null) applyToJob(client, id, some);
  }
  // A contributor is leased or released when a job changes its state.
  if (events.some((event) => event.kind === "contributor" || changesJob(event))) {
    void client.invalidateQueries({ queryKey: contributors.queryKey });
  }
  if (events.some((event) => changesJob(event))) void client.invalidateQueries({ queryKey: ["jobs"] });
  if (events.some((event) => OPERATORS.has(event.kind) || changesJob(event))) {
    void client.invalidateQueries({ queryKey: OPERATIONS });
  }
  // A machine that joins uses an invite.
  if (events.some((event) => event.kind === "contributor")) {
    void client.invalidateQueries({ queryKey: invites.queryKey });
  }
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
  return [...known.filter((metric) => !replaced.has(name(metric))), ...fresh].sort((a, b) => a.step - b.step);
}

/** Put events after those that are known; the curves tell the steps, so the log leaves them out. */
export function mergeLog(known: PoolEvent[], events: PoolEvent[]): PoolEvent[] {
  const last = known.at(-1)?.seq ?? 0;
  const fresh = events.filter((event) => event.kind !== "step" && event.seq > last);
  return fresh.length === 0 ? known : [...known, ...fresh];
}
