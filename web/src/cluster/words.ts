/** Descriptions of machines and links, shared by the map, the table and screen readers. */
import type { TFunction } from "i18next";

import type { ContributorState, MachineSummary, Held, UtilizationSample } from "../api/types";
import { bytes, latency, si } from "../format";
import type { MachineGroup } from "./groups";
import { qualityOf, type Quality } from "./layout";

/** "layers 3–7 of 12", or null while there is no plan. */
export function partWords(t: TFunction, held: Pick<Held, "start" | "stop" | "num_layers">): string | null {
  const { start, stop, num_layers: total } = held;
  if (start == null || stop == null) return null;
  return stop - start === 1
    ? t("layer {{first}} of {{total}}", { first: start, total })
    : t("layers {{first}}–{{last}} of {{total}}", { first: start, last: stop - 1, total });
}

/** "31 MiB of 4.0 GiB", or only the lent memory. */
export function memoryWords(t: TFunction, machine: Pick<MachineSummary, "held" | "lent_bytes">): string {
  const used = machine.held?.memory_bytes ?? null;
  if (used === null) return bytes(machine.lent_bytes);
  return t("{{used}} of {{lent}}", { used: bytes(used), lent: bytes(machine.lent_bytes) });
}

export function linkWords(latencyS: number | null, bytesPerS: number | null): string {
  if (latencyS === null || bytesPerS === null) return "–";
  return `${latency(latencyS)} · ${si(bytesPerS, "B/s")}`;
}

export function qualityWords(t: TFunction, quality: Quality): string {
  const words: Record<Quality, string> = {
    good: t("good link"),
    fair: t("fair link"),
    poor: t("slow link"),
    none: t("no link"),
  };
  return words[quality];
}

export function speedWords(machine: Pick<MachineSummary, "flops_per_s">): string {
  return machine.flops_per_s > 0 ? si(machine.flops_per_s, "FLOP/s") : "–";
}

/** The state of a machine, or "at work" if it is ready and works for a job or a deployment, as the command line says. */
export function machineState(state: ContributorState, isLeased: boolean): ContributorState | "at work" {
  return state === "ready" && isLeased ? "at work" : state;
}

/** The machine's work: the name of its job or deployment, or its state. */
export function workWords(t: TFunction, machine: Pick<MachineSummary, "held" | "state">): string {
  if (machine.held !== null) return machine.held.name || (machine.held.job_id ?? machine.held.deployment_id ?? "");
  return t(machine.state);
}

export function groupTitle(t: TFunction, group: Pick<MachineGroup, "kind" | "machines">, number: number): string {
  // Until the islands have been recomputed, newly measured machines are among the others.
  if (group.kind === "arriving") return group.machines.some(({ state }) => state === "ready") ? t("Without an island yet") : t("Arriving");
  return group.kind === "gone" ? t("Gone") : t("Island {{number}}", { number });
}

/** A machine in one sentence, for screen readers. */
export function describe(t: TFunction, machine: MachineSummary): string {
  const part = machine.held && partWords(t, machine.held);
  return [
    machine.name,
    machine.owner,
    t(machineState(machine.state, machine.held !== null)),
    machine.held === null ? null : workWords(t, machine),
    part,
    machine.kind === null ? null : speedWords(machine),
    memoryWords(t, machine),
    machine.head_bytes_per_s === null ? null : qualityWords(t, qualityOf(machine.head_bytes_per_s)),
  ]
    .filter(Boolean)
    .join(", ");
}

/** "83%". */
export function shareText(share: number): string {
  return `${Math.round(100 * share)}%`;
}

/** A figure of a machine's utilization with its unit. */
export function figureWords(t: TFunction, unit: "bytes" | "celsius" | "rate", value: number): string {
  if (unit === "celsius") return t("{{number}} °C", { number: Math.round(value) });
  return unit === "bytes" ? bytes(value) : si(value, "B/s");
}

/** Fraction in use of the lent GPU, or of the lent threads; undefined if nothing was measured. */
export function busyOf(used: Pick<UtilizationSample, "cpu_fraction" | "gpu_fraction"> | undefined): number | undefined {
  return used?.gpu_fraction ?? used?.cpu_fraction ?? undefined;
}

/** "CPU 83%, GPU 20%, 61 °C": a machine's present utilization. */
export function usedWords(t: TFunction, used: UtilizationSample): string {
  const hottest = Math.max(used.cpu_celsius ?? -Infinity, used.gpu_celsius ?? -Infinity);
  return [
    used.cpu_fraction == null ? null : t("CPU {{share}}", { share: shareText(used.cpu_fraction) }),
    used.gpu_fraction == null ? null : t("GPU {{share}}", { share: shareText(used.gpu_fraction) }),
    Number.isFinite(hottest) ? figureWords(t, "celsius", hottest) : null,
  ]
    .filter(Boolean)
    .join(", ");
}
