/** Alerts that the user has acknowledged in this browser. A changed alert counts as new. */
import { useSyncExternalStore } from "react";

import type { Alert } from "../api/types";
import { keep, kept } from "../kept";

const NAME = "share-compute.acknowledged";

/** Version of each acknowledged alert, by its id. */
export type Acknowledged = Readonly<Record<string, string>>;

const NOTHING: Acknowledged = {};
const listeners = new Set<() => void>();
let current: Acknowledged | undefined;

/** Text that differs after each change of an alert that matters. Sizes are left out, since they change all the time. */
export function versionOf({ severity, since, text }: Pick<Alert, "severity" | "since" | "text">): string {
  return [severity, since ?? "", text.replace(/\d+(\.\d+)? ([KMGT]i?)?B\b/g, "")].join(" ");
}

export function isAcknowledged(known: Acknowledged, alert: Alert): boolean {
  return known[alert.id] === versionOf(alert);
}

/** Entries of alerts that still exist, so that an alert that ended counts as new when it begins again. */
export function pruned(known: Acknowledged, alerts: readonly Alert[]): Acknowledged {
  const ids = new Set(alerts.map((alert) => alert.id));
  const current = Object.entries(known).filter(([id]) => ids.has(id));
  return current.length === Object.keys(known).length ? known : Object.fromEntries(current);
}

function read(): Acknowledged {
  if (current === undefined) {
    try {
      current = { ...(JSON.parse(kept(NAME) ?? "{}") as Acknowledged) };
    } catch {
      current = NOTHING;
    }
  }
  return current;
}

function write(next: Acknowledged): void {
  if (next === read()) return;
  current = next;
  keep(NAME, JSON.stringify(next));
  listeners.forEach((listener) => listener());
}

export function acknowledge(alerts: readonly Alert[]): void {
  write({ ...read(), ...Object.fromEntries(alerts.map((alert) => [alert.id, versionOf(alert)])) });
}

/** Show acknowledged alerts as new again. */
export function restore(alerts: readonly Alert[]): void {
  const ids = new Set(alerts.map((alert) => alert.id));
  write(Object.fromEntries(Object.entries(read()).filter(([id]) => !ids.has(id))));
}

export function forgetEnded(alerts: readonly Alert[]): void {
  write(pruned(read(), alerts));
}

function subscribe(listener: () => void): () => void {
  const onStorage = ({ key }: StorageEvent) => {
    if (key !== NAME) return;
    current = undefined;
    listener();
  };
  listeners.add(listener);
  addEventListener("storage", onStorage);
  return () => {
    listeners.delete(listener);
    removeEventListener("storage", onStorage);
  };
}

export function useAcknowledged(): Acknowledged {
  return useSyncExternalStore(subscribe, read);
}
