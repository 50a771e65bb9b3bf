/** Groups the machines of the cluster: by island, or as arriving or gone if they have no island. */
import { isGone, type MachineSummary, type Island, type ClusterView } from "../api/types";

export type GroupKind = "island" | "arriving" | "gone";

export interface MachineGroup {
  /** Id of the island, or the kind of the group. */
  id: string;
  kind: GroupKind;
  machines: MachineSummary[];
  /** The island's measurements; absent for groups that are not islands. */
  island?: Island;
}

/** Groups: islands in the server's order, then arriving machines, then gone machines. */
export function groupsOf(cluster: ClusterView, showsGone: boolean): MachineGroup[] {
  const rest = new Map(cluster.machines.map((machine) => [machine.id, machine]));
  const gone: MachineSummary[] = [];
  for (const machine of cluster.machines) {
    if (!isGone(machine)) continue;
    rest.delete(machine.id);
    gone.push(machine);
  }
  const groups: MachineGroup[] = [];
  for (const island of cluster.islands.islands) {
    const machines: MachineSummary[] = [];
    for (const id of island.machines) {
      const machine = rest.get(id);
      if (machine === undefined || machine.kind === null) continue;
      rest.delete(id);
      machines.push(machine);
    }
    if (machines.length > 0) groups.push({ id: island.id, kind: "island", machines, island });
  }
  if (rest.size > 0) groups.push({ id: "arriving", kind: "arriving", machines: [...rest.values()] });
  if (showsGone && gone.length > 0) groups.push({ id: "gone", kind: "gone", machines: gone });
  return groups;
}

export interface Sums {
  machines: number;
  atWork: number;
  flopsPerS: number;
  lentBytes: number;
  usedBytes: number;
}

export function sumsOf(machines: readonly MachineSummary[]): Sums {
  const sums: Sums = { machines: machines.length, atWork: 0, flopsPerS: 0, lentBytes: 0, usedBytes: 0 };
  for (const machine of machines) {
    if (machine.held !== null) sums.atWork += 1;
    sums.flopsPerS += machine.flops_per_s;
    sums.lentBytes += machine.lent_bytes;
    sums.usedBytes += machine.held?.memory_bytes ?? 0;
  }
  return sums;
}

/** A job or a deployment, with the machines that work for it. */
export interface Work {
  /** Id of the job or of the deployment. */
  id: string;
  name: string;
  isJob: boolean;
  /** Ids of its machines. */
  machines: string[];
}

/** Return the jobs and deployments that hold machines, sorted by number of machines, largest first. */
export function worksOf(machines: readonly MachineSummary[]): Work[] {
  const works = new Map<string, Work>();
  for (const { id: machine, held } of machines) {
    const id = held?.job_id ?? held?.deployment_id;
    if (held === null || id == null) continue;
    const known = works.get(id);
    if (known === undefined) works.set(id, { id, name: held.name || id, isJob: held.job_id != null, machines: [machine] });
    else known.machines.push(machine);
  }
  return [...works.values()].sort((a, b) => b.machines.length - a.machines.length || a.name.localeCompare(b.name));
}

/** Machines whose text contains the search term; `words` returns the text of a machine. */
export function found(machines: readonly MachineSummary[], wanted: string | undefined): readonly MachineSummary[] {
  const parts = (wanted ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (parts.length === 0) return machines;
  return machines.filter((machine) => {
    const { name, owner, host, device, state, held, id } = machine;
    const text = [name, owner, host, device, state, held?.name, held?.job_id, held?.deployment_id, id].join(" ").toLowerCase();
    return parts.every((part) => text.includes(part));
  });
}

/** The current groups; unchanged groups stay the same objects, so that they are not rendered again. */
export function reused(before: readonly MachineGroup[], now: readonly MachineGroup[]): MachineGroup[] {
  const known = new Map(before.map((group) => [group.id, group]));
  return now.map((group) => {
    const old = known.get(group.id);
    const isSame =
      old !== undefined &&
      old.machines.length === group.machines.length &&
      old.island?.bytes_per_s === group.island?.bytes_per_s &&
      old.island?.latency_s === group.island?.latency_s &&
      old.machines.every((machine, place) => machine === group.machines[place]);
    return isSame ? old : group;
  });
}
