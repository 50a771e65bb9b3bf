/** Groups alerts that report the same condition of several machines, jobs or deployments. */
import type { Alert } from "../api/types";

export interface AlertGroup {
  /** Key that stays the same while the group has the same condition. */
  key: string;
  kind: Alert["kind"];
  severity: Alert["severity"];
  /** The condition, without the name of the machine, job or deployment. */
  condition: string;
  /** Alerts of the group, at least one, in the server's order. */
  alerts: Alert[];
}

/** Return the text of an alert, in any language, without the leading kind and name: "was lost: its Ray node died". */
export function conditionOf({ name, text }: Pick<Alert, "name" | "text">): string {
  if (name == null) return text;
  const place = text.indexOf(` ${name} `);
  return place < 0 ? text : text.slice(place + name.length + 2);
}

/** The position of a group is that of its first alert. */
export function groupAlerts(alerts: readonly Alert[]): AlertGroup[] {
  const groups = new Map<string, AlertGroup>();
  for (const alert of alerts) {
    const condition = conditionOf(alert);
    const key = `${alert.severity} ${alert.kind} ${condition}`;
    const known = groups.get(key);
    if (known === undefined) groups.set(key, { key, kind: alert.kind, severity: alert.severity, condition, alerts: [alert] });
    else known.alerts.push(alert);
  }
  return [...groups.values()];
}
