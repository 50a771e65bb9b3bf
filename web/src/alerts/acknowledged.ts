/** Alerts that the user has acknowledged in this browser. A changed alert counts as new. */
import type { Alert } from "../api/types";
import { kept, Shared } from "../kept";

const NAME = "share-compute.acknowledged";

/** Version of each acknowledged alert, by its id. */
export type Acknowledged = Readonly<Record<string, string>>;

const shared = new Shared<Acknowledged>([NAME], () => {
  try {
    return { ...(JSON.parse(kept(NAME) ?? "{}") as Acknowledged) };
  } catch {
    return {};
  }
});

/** Text that differs after each relevant change of an alert. Sizes are left out, because they change all the time. */
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

function write(next: Acknowledged): void {
  if (next !== shared.get()) shared.keep(NAME, JSON.stringify(next));
}

export function acknowledge(alerts: readonly Alert[]): void {
  write({ ...shared.get(), ...Object.fromEntries(alerts.map((alert) => [alert.id, versionOf(alert)])) });
}

/** Show acknowledged alerts as new again. */
export function restore(alerts: readonly Alert[]): void {
  const ids = new Set(alerts.map((alert) => alert.id));
  write(Object.fromEntries(Object.entries(shared.get()).filter(([id]) => !ids.has(id))));
}

export function forgetEnded(alerts: readonly Alert[]): void {
  write(pruned(shared.get(), alerts));
}

export function useAcknowledged(): Acknowledged {
  return shared.use();
}
