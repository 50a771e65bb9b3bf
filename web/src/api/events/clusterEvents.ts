/** Applies events to the cluster overview: changes single rows, and fetches only rows that events do not describe. */
import type { QueryClient } from "@tanstack/react-query";

import { machinesOfCluster, cluster } from "../queries";
import { isGone, type ContributorState, type MachineSummary, type Held, type ClusterEvent, type ClusterView } from "../types";
import { Refresher } from "./refresher";
import { write } from "./write";

/** Above this number, one request for the whole cluster is cheaper than one that names each machine. */
const MOST_NAMED = 100;
/** Time that the server needs to compute the islands of many machines; it responds before they are ready. */
const ISLANDS_MS = 3000;

interface Change {
  cluster: ClusterView;
  /** Machines whose rows must be fetched, because events did not contain everything. */
  unknown: string[];
}

/** Return the cluster after some events. Unaffected rows stay the same objects, so that they are not rendered again. */
export function changed(before: ClusterView, events: readonly ClusterEvent[]): Change {
  const places = new Map(before.machines.map((machine, place) => [machine.id, place]));
  const unknown = new Set<string>();
  let machines: MachineSummary[] | undefined;
  for (const event of events) {
    const id = event.contributor_id;
    if (id === null || (event.kind !== "contributor" && event.kind !== "work")) continue;
    const place = places.get(id);
    if (place === undefined) {
      unknown.add(id);
      continue;
    }
    machines ??= [...before.machines];
    machines[place] = { ...machines[place]!, ...changeOf(event) };
    // The event does not contain the measurements, which determine the islands.
    if (event.kind === "contributor" && event.data.state !== "probing" && event.data.state !== "joining") unknown.add(id);
  }
  return { cluster: machines === undefined ? before : { ...before, machines }, unknown: [...unknown] };
}

function changeOf(event: ClusterEvent): Partial<MachineSummary> {
  if (event.kind === "work") return { held: heldBy(event.data) };
  const { state, reason } = event.data as { state: ContributorState; reason: string };
  const hasGone = isGone({ state });
  return {
    state,
    reason,
    last_seen_at: event.at,
    left_at: hasGone ? event.at : null,
    ...(hasGone && { held: null }),
  };
}

/** The holder of a machine after a `work` event; null if it is free. */
export function heldBy(data: Record<string, unknown>): Held | null {
  const { job, deployment, ...part } = data as { job: string | null; deployment: string | null } & Partial<Held>;
  if (job == null && deployment == null) return null;
  const nothing = { start: null, stop: null, num_layers: null, stage: null, microbatches: null };
  return { name: "", ...nothing, of_microbatches: null, memory_bytes: null, ...part, job_id: job, deployment_id: deployment };
}

/** Replace known rows by those of the server; new rows are appended in the order in which machines joined. */
export function merged(before: ClusterView, fresh: ClusterView): ClusterView {
  const rows = new Map(fresh.machines.map((machine) => [machine.id, machine]));
  const names = new Set(fresh.machines.map((machine) => machine.name));
  const machines = before.machines.flatMap((machine) => {
    const row = rows.get(machine.id);
    // A lost machine that joined again has a new row.
    if (row === undefined && isGone(machine) && names.has(machine.name)) return [];
    rows.delete(machine.id);
    return [row ?? machine];
  });
  return { machines: [...machines, ...rows.values()], islands: fresh.islands };
}

/** Keeps the cached cluster current. */
export class ClusterCacheUpdater {
  private readonly wanted = new Set<string>();

  constructor(
    private readonly client: QueryClient,
    private readonly refresher: Refresher,
  ) {}

  apply(events: readonly ClusterEvent[]): void {
    const before = this.client.getQueryData(cluster.queryKey);
    if (before !== undefined) {
      const { cluster: after, unknown } = changed(before, events);
      write<ClusterView>(this.client, cluster.queryKey, () => after);
      for (const id of unknown) this.wanted.add(id);
    }
    // A response that was requested before these events may not include them.
    if (this.client.isFetching({ queryKey: cluster.queryKey }) > 0) {
      for (const event of events) if (event.contributor_id !== null) this.wanted.add(event.contributor_id);
    }
    this.ask();
  }

  private ask(): void {
    if (this.wanted.size > 0) this.refresher.run("machines of the cluster", () => this.fetch());
  }

  private async fetch(): Promise<void> {
    await this.refresher.answered({ queryKey: cluster.queryKey });
    const ids = [...this.wanted];
    this.wanted.clear();
    if (ids.length === 0) return;
    if (ids.length > MOST_NAMED) return this.client.invalidateQueries({ queryKey: cluster.queryKey });
    const fresh = await machinesOfCluster(ids);
    write<ClusterView>(this.client, cluster.queryKey, (before) => merged(before, fresh));
    if (!fresh.islands.is_current) {
      setTimeout(() => {
        this.wanted.add(ids[0]!);
        this.ask();
      }, ISLANDS_MS);
    }
  }
}
