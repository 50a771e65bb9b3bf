/**
 * The work that the machines do now: one entry for each job or deployment, with the mean utilization of its machines.
 */
import { Text } from "@mantine/core";
import { Link } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import type { MachineSummary } from "../api/types";
import { worksOf, type Work } from "./groups";
import classes from "./ClusterMap.module.css";
import type { Utilizations } from "./useUtilization";
import { busyOf, shareText } from "./words";

/** Entries beside each other on a desktop. */
const MOST = 4;

export function AtWork({ machines, used }: { machines: readonly MachineSummary[]; used: Utilizations }) {
  const { t } = useTranslation();
  const works = worksOf(machines);
  if (works.length === 0) return null;
  return (
    <ul className={classes.works} aria-label={t("At work")}>
      {works.slice(0, MOST).map((work) => (
        <Entry key={work.id} work={work} used={used} />
      ))}
      {works.length > MOST && (
        <li>
          <Link to="/jobs" className={classes.others}>
            {t("and {{count}} more", { count: works.length - MOST })}
          </Link>
        </li>
      )}
    </ul>
  );
}

function Entry({ work, used }: { work: Work; used: Utilizations }) {
  const { t } = useTranslation();
  const shares = work.machines.flatMap((id) => busyOf(used[id]) ?? []);
  const mean = shares.length === 0 ? undefined : shares.reduce((sum, share) => sum + share, 0) / shares.length;
  return (
    <li className={classes.work}>
      {work.isJob ? (
        <Link to="/jobs/$jobId" params={{ jobId: work.id }}>
          {work.name}
        </Link>
      ) : (
        <Link to="/deployments/$name" params={{ name: work.name }}>
          {work.name}
        </Link>
      )}
      <Text component="span" size="xs" c="dimmed">
        {[t("{{count}} machines", { count: work.machines.length }), mean !== undefined && t("{{share}} in use", { share: shareText(mean) })].filter(Boolean).join(" · ")}
      </Text>
      {mean !== undefined && (
        <span className="gauge" aria-hidden>
          <span style={{ width: `${100 * mean}%` }} />
        </span>
      )}
    </li>
  );
}
