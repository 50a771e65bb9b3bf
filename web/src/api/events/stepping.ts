/** Jobs that are committing steps now, according to the cluster's events. */
import { useEffect, useState } from "react";

import { subscribe } from "./eventListeners";
import type { ClusterEvent } from "../types";

/** A step counts as recent for twice its own time, and for at least this time. */
const LEAST_MS = 10_000;
const CHECK_MS = 2000;

/** Time in ms until which each job counts as stepping, by job id. */
export type Until = ReadonlyMap<string, number>;

/** Return `until` after an event at `now` (ms); the same object if it changes nothing. */
export function afterEvent(until: Until, { kind, job_id, data }: Pick<ClusterEvent, "kind" | "job_id" | "data">, now: number): Until {
  if (job_id === null) return until;
  if (kind === "step") return new Map([...until, [job_id, now + Math.max(LEAST_MS, 2000 * (data as { seconds: number }).seconds)]]);
  return kind === "state" && data.state !== "running" ? without(until, (id) => id === job_id) : until;
}

/** Return `until` without the jobs whose last step is no longer recent; the same object if there are none. */
export function stillStepping(until: Until, now: number): Until {
  return without(until, (_, end) => end < now);
}

function without(until: Until, isOver: (id: string, end: number) => boolean): Until {
  const left = [...until].filter(([id, end]) => !isOver(id, end));
  return left.length === until.size ? until : new Map(left);
}

/** Ids of the jobs that committed a step recently; the same object while they are the same. */
export function useStepping(): ReadonlySet<string> {
  const [ids, setIds] = useState<ReadonlySet<string>>(new Set());
  useEffect(() => {
    let until: Until = new Map();
    const update = (next: Until) => {
      until = next;
      setIds((old) => (old.size === next.size && [...next.keys()].every((id) => old.has(id)) ? old : new Set(next.keys())));
    };
    const stop = subscribe((event) => update(afterEvent(until, event, Date.now())));
    const timer = setInterval(() => update(stillStepping(until, Date.now())), CHECK_MS);
    return () => {
      stop();
      clearInterval(timer);
    };
  }, []);
  return ids;
}
