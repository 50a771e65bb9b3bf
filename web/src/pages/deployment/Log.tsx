import { useQuery } from "@tanstack/react-query";
import { Fragment, memo } from "react";
import { useTranslation } from "react-i18next";

import { deploymentLog } from "../../api/queries";
import { Waiting } from "../../components/Feedback";
import { clock, dateAndTime } from "../../format";
import classes from "../job/log/Log.module.css";
import { toneOf, wordsFor } from "./words";

/** Events of a deployment, newest first. */
export const Log = memo(function Log({ deploymentId }: { deploymentId: string }) {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(deploymentLog(deploymentId));
  if (data === undefined) return <Waiting error={error} refetch={refetch} />;
  return (
    <div className={classes.scroll} tabIndex={0} role="log" aria-label={t("Events")}>
      <dl className={classes.log}>
        {data.toReversed().map((event) => (
          <Fragment key={event.seq}>
            <dt title={dateAndTime(event.at)}>{clock(event.at)}</dt>
            <dd data-tone={toneOf(event)}>{wordsFor(event, t)}</dd>
          </Fragment>
        ))}
      </dl>
    </div>
  );
});
