/** The machines of a job, with their states as the cluster reports them. */
import { useQuery } from "@tanstack/react-query";
import { useCallback } from "react";

import { cluster } from "../../api/queries";
import { isGone, type ClusterEvent, type ClusterView, type Job, type MachineSummary, type Plan } from "../../api/types";
import type { Departure } from "../../placement/Placement";

export type Members = readonly Pick<MachineSummary, "id" | "name" | "state" | "reason">[];

/** Ids of the machines that compute a part of the plan; null without a plan. */
export function idsInPlan({ plan }: Pick<Job, "plan">): ReadonlySet<string> | null {
  return plan === null ? null : new Set(membersIn(plan).map((member) => member.contributor_id));
}

function membersIn({ stages, branches }: Plan) {
  const all = branches.length > 0 ? branches.flatMap((branch) => branch.stages) : stages;
  return all.flatMap((stage) => stage.members);
}

/** The machines of the plan, or those that the job holds; events change their states at once. */
export function membersOf(job: Pick<Job, "id" | "plan">, { machines }: ClusterView): Members {
  const ids = idsInPlan(job);
  return machines
    .filter(({ id, held }) => (ids === null ? held?.job_id === job.id : ids.has(id)))
    .map(({ id, name, state, reason }) => ({ id, name, state, reason }));
}

export function useMembers(job: Pick<Job, "id" | "plan">): Members | undefined {
  const select = useCallback((view: ClusterView) => membersOf(job, view), [job.id, job.plan]);
  return useQuery({ ...cluster, select }).data;
}

/**
 * How each former machine of the job left: members of the plan that the cluster reports as gone before there is a new
 * plan, and members of earlier plans. The last event counts.
 */
export function departuresOf(members: Members, events: readonly ClusterEvent[]): Map<string, Departure> {
  const found = new Map<string, Departure>();
  for (const { kind, data } of events) {
    if (kind !== "reformed") continue;
    const { lost = [], left = [], joined = [] } = data as { lost?: string[]; left?: string[]; joined?: string[] };
    for (const id of joined) found.delete(id);
    for (const id of lost) found.set(id, "lost");
    for (const id of left) found.set(id, "left");
  }
  for (const member of members) {
    found.delete(member.id);
    if (isGone(member)) found.set(member.id, member.state === "lost" ? "lost" : "left");
  }
  return found;
}

/** Machines that a finished job had lost by its end, according to its log; their names are from its plans. */
export function lostDuring({ finished_at }: Pick<Job, "finished_at">, events: readonly ClusterEvent[]): { id: string; name: string }[] {
  const end = finished_at === null ? Infinity : Date.parse(finished_at);
  const during = events.filter(({ at }) => Date.parse(at) <= end);
  const names = new Map<string, string>();
  for (const { kind, data } of during) {
    if (kind !== "planned" && kind !== "reformed") continue;
    for (const { contributor_id, name } of membersIn((data as { plan: Plan }).plan)) names.set(contributor_id, name);
  }
  return [...departuresOf([], during)].flatMap(([id, departure]) => (departure === "lost" ? [{ id, name: names.get(id) ?? id }] : []));
}
