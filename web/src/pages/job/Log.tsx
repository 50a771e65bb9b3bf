import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { Fragment } from "react";

import { log } from "../../api/queries";
import { Failure, Loading } from "../../components/Feedback";
import { clock, dateAndTime } from "../../format";
import classes from "./Log.module.css";
import { toneOf, wordsFor } from "./words";

/** What happened, newest first; the steps are in the curves. */
export function Log({ jobId }: { jobId: string }) {
  const { data, error, refetch } = useQuery(log(jobId));
  if (data === undefined) return error === null ? <Loading /> : <Failure error={error} retry={() => void refetch()} />;
  if (data.length === 0) return <Text c="dimmed">Nothing has happened yet.</Text>;
  return (
    <div className={classes.scroll} tabIndex={0} role="log" aria-label="Log">
      <dl className={classes.log}>
        {data.toReversed().map((event) => (
          <Fragment key={event.seq}>
            <dt title={dateAndTime(event.at)}>{clock(event.at)}</dt>
            <dd data-tone={toneOf(event)}>{wordsFor(event)}</dd>
          </Fragment>
        ))}
      </dl>
    </div>
  );
}
