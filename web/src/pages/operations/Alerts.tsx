import { Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Alert } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { AnchorLink } from "../../components/links";
import { MachineLink } from "../../components/MachineLink";
import { ago, dateAndTime } from "../../format";
import { useNow } from "../../useNow";
import classes from "./Alerts.module.css";

/** Alerts, worst first. The server checks every few seconds, and reports changes by events. */
export function Alerts({ alerts }: { alerts: readonly Alert[] }) {
  const { t } = useTranslation();
  const now = useNow(alerts.length > 0);
  if (alerts.length === 0) {
    return (
      <Text size="sm" role="status">
        {t("Nothing is the matter.")}
      </Text>
    );
  }
  return (
    <ul className={classes.list}>
      {alerts.map((alert) => (
        <li key={alert.id} className={classes.alert} data-severity={alert.severity}>
          <span className={classes.mark}>{alert.severity === "error" ? t("Error") : t("Warning")}</span>
          <div className={classes.words}>
            <Text size="sm">{sentence(alert.text)}</Text>
            {alert.hint != null && (
              <Text size="sm" c="dimmed">
                {sentence(alert.hint)}
              </Text>
            )}
            {alert.job_id != null && (
              <AnchorLink to="/jobs/$jobId" params={{ jobId: alert.job_id }} size="sm">
                {t("Open the job")}
              </AnchorLink>
            )}
            {alert.contributor_id != null && alert.job_id == null && (
              <MachineLink id={alert.contributor_id} name={t("Open the machine")} />
            )}
          </div>
          {alert.since != null && (
            <Text size="sm" c="dimmed" className={classes.since} title={dateAndTime(alert.since)}>
              {ago(alert.since, now)}
            </Text>
          )}
        </li>
      ))}
    </ul>
  );
}
