import { Button, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import { acknowledge, restore } from "../../alerts/acknowledged";
import { conditionOf, groupAlerts, type AlertGroup } from "../../alerts/groups";
import type { KnownAlerts } from "../../alerts/useAlerts";
import type { Alert } from "../../api/types";
import { clause, sentence } from "../../components/Feedback";
import { AnchorLink } from "../../components/links";
import { MachineLink } from "../../components/MachineLink";
import { ago, dateAndTime } from "../../format";
import { useNow } from "../../useNow";
import classes from "./Alerts.module.css";

/** Alerts, worst first. The server checks every few seconds, and reports changes by events. */
export function Alerts({ alerts: { fresh, acknowledged } }: { alerts: KnownAlerts }) {
  const { t } = useTranslation();
  return (
    <>
      {fresh.length === 0 ? (
        <Text size="sm" role="status">
          {acknowledged.length === 0 ? t("Nothing is the matter.") : t("No new alerts.")}
        </Text>
      ) : (
        <AlertList alerts={fresh} action={t("Acknowledge")} onAction={acknowledge} />
      )}
      {acknowledged.length > 0 && (
        <details className={classes.acknowledged}>
          <summary>{t("{{count}} acknowledged in this browser", { count: acknowledged.length })}</summary>
          <AlertList alerts={acknowledged} action={t("Show as new")} onAction={restore} />
        </details>
      )}
    </>
  );
}

interface ListProps {
  alerts: readonly Alert[];
  /** Label of the button of each group. */
  action: string;
  onAction: (alerts: readonly Alert[]) => void;
}

function AlertList({ alerts, action, onAction }: ListProps) {
  const { t } = useTranslation();
  const now = useNow(alerts.length > 0);
  return (
    <ul className={classes.list}>
      {groupAlerts(alerts).map((group) => {
        const title = titleOf(t, group);
        return (
          <li key={group.key} className={classes.alert} data-severity={group.severity}>
            <span className={classes.mark}>{group.severity === "error" ? t("Error") : t("Warning")}</span>
            <div className={classes.words}>
              {group.alerts.length === 1 ? (
                <One alert={group.alerts[0]!} title={title} />
              ) : (
                <details>
                  <summary>{title}</summary>
                  <ul className={classes.members}>
                    {group.alerts.map((alert) => (
                      <li key={alert.id}>
                        <Subject alert={alert} label={alert.name ?? ""} />
                        <Text component="span" size="sm" c="dimmed">
                          {[alert.since != null && ago(alert.since, now), alert.hint != null && sentence(alert.hint)].filter(Boolean).join(" · ")}
                        </Text>
                      </li>
                    ))}
                  </ul>
                </details>
              )}
            </div>
            <div className={classes.end}>
              <Since alert={group.alerts[0]!} now={now} />
              <Button size="compact-xs" variant="default" aria-label={`${action}: ${title}`} onClick={() => onAction(group.alerts)}>
                {action}
              </Button>
            </div>
          </li>
        );
      })}
    </ul>
  );
}

function One({ alert, title }: { alert: Alert; title: string }) {
  const { t } = useTranslation();
  const labels = { job: t("Open the job"), machine: t("Open the machine"), deployment: t("Open the deployment") };
  return (
    <>
      <Text size="sm">{title}</Text>
      {alert.hint != null && (
        <Text size="sm" c="dimmed">
          {sentence(alert.hint)}
        </Text>
      )}
      <Subject alert={alert} label={labels[subjectOf(alert)]} />
    </>
  );
}

function subjectOf({ job_id, contributor_id }: Alert): "job" | "machine" | "deployment" {
  return job_id != null ? "job" : contributor_id != null ? "machine" : "deployment";
}

/** A link to the page of the alert's machine, job or deployment; nothing for alerts about the server. */
function Subject({ alert, label }: { alert: Alert; label: string }) {
  if (alert.job_id != null) {
    return (
      <AnchorLink to="/jobs/$jobId" params={{ jobId: alert.job_id }} size="sm">
        {label}
      </AnchorLink>
    );
  }
  if (alert.contributor_id != null) return <MachineLink id={alert.contributor_id} name={label} />;
  if (alert.deployment_id == null) return null;
  return (
    <AnchorLink to="/deployments/$name" params={{ name: alert.deployment_id }} size="sm">
      {label}
    </AnchorLink>
  );
}

function Since({ alert: { since }, now }: { alert: Alert; now: number }) {
  if (since == null) return null;
  return (
    <Text size="sm" c="dimmed" title={dateAndTime(since)}>
      {ago(since, now)}
    </Text>
  );
}

/** The text of a single alert; for several, their number and their common condition. */
function titleOf(t: ReturnType<typeof useTranslation>["t"], { alerts }: AlertGroup): string {
  const [first] = alerts;
  if (alerts.length === 1) return sentence(first!.text);
  const condition = conditionOf({ name: first!.name ?? null, text: clause(first!.text) });
  const of = { number: alerts.length, condition };
  switch (subjectOf(first!)) {
    case "job":
      return t("Each of {{number}} jobs {{condition}}", of);
    case "machine":
      return t("Each of {{number}} machines {{condition}}", of);
    case "deployment":
      return t("Each of {{number}} deployments {{condition}}", of);
  }
}
