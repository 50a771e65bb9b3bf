/** Measured work of each machine of a job: the fraction of a step in which it computes, and its traffic. */
import type { ClusterEvent, Measured } from "../api/types";

export interface Work {
  /** Measured fraction of a step in which the machine computes, from 0 to 1; null before the first measurement. */
  computing: number | null;
  /** Mean rates since the previous report; null before the first report. */
  sentBytesPerS: number | null;
  receivedBytesPerS: number | null;
}

interface Traffic {
  machines: Record<string, { sent_bytes: number; received_bytes: number }>;
}

const NOTHING: Work = { computing: null, sentBytesPerS: null, receivedBytesPerS: null };
/** The work of each machine by id, from the last measurement and the last report of its traffic. */
export function workOf(measured: Measured | null | undefined, events: readonly ClusterEvent[]): ReadonlyMap<string, Work> {
  const found = new Map<string, Work>();
  const step = measured?.measured_step_s ?? 0;
  if (step > 0) {
    for (const [id, seconds] of Object.entries(measured?.machines ?? {})) {
      found.set(id, { ...NOTHING, computing: Math.min(1, seconds / step) });
    }
  }
  // An attempt counts from its start, and each machine from the last report that names the machine.
  let start = NaN;
  const reported = new Map<string, number>();
  for (const { kind, at, data } of events) {
    if (kind === "started") {
      start = Date.parse(at);
      reported.clear();
    }
    if (kind !== "traffic") continue;
    for (const [id, { sent_bytes, received_bytes }] of Object.entries((data as unknown as Traffic).machines)) {
      const seconds = (Date.parse(at) - (reported.get(id) ?? start)) / 1000;
      reported.set(id, Date.parse(at));
      if (!(seconds > 0)) continue;
      const rates = { sentBytesPerS: sent_bytes / seconds, receivedBytesPerS: received_bytes / seconds };
      found.set(id, { ...(found.get(id) ?? NOTHING), ...rates });
    }
  }
  return found;
}
