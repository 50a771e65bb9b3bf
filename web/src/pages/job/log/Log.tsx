import { Button, Group, NativeSelect, Switch, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { Fragment, memo, useEffect, useLayoutEffect, useMemo, useState } from "react";
import { useTranslation } from "react-i18next";

import { log } from "../../../api/queries";
import type { ClusterEvent } from "../../../api/types";
import { Waiting } from "../../../components/Feedback";
import { clock, count, dateAndTime } from "../../../format";
import { EVENT_GROUPS, type EventGroup } from "../search";
import classes from "./Log.module.css";
import { groupOf, toneOf, wordsFor } from "./words";

/** Number of rows shown at first, and added by each click: ten thousand at once would make the page slow. */
const ROWS = 200;
/** Maximum distance from the end at which the log counts as scrolled to the end. */
const NEAR_PX = 24;

/** Keys of `t`. */
const GROUPS: Record<EventGroup, string> = {
  plan: "Plan and machines",
  progress: "Measurements",
  samples: "Samples",
  results: "Checkpoints and artifacts",
  notes: "Notes and problems",
};

/** Events of the job in order, scrolled to the end; the steps are in the curves. */
export const Log = memo(function Log({ jobId }: { jobId: string }) {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(log(jobId));
  const { events: group } = useSearch({ from: "/jobs/$jobId" });
  const navigate = useNavigate({ from: "/jobs/$jobId" });
  const [follows, setFollows] = useState(true);
  const [rows, setRows] = useState(ROWS);
  const wanted = useMemo(() => (data ?? []).filter((event) => group === undefined || groupOf(event) === group), [data, group]);
  const shown = wanted.slice(-rows);
  const scroll = useFollowing(shown, follows, setFollows);

  if (data === undefined) return <Waiting error={error} refetch={refetch} />;
  return (
    <div>
      <Group justify="space-between" align="center" mb="xs">
        <NativeSelect
          size="xs"
          aria-label={t("Show")}
          value={group ?? ""}
          onChange={(event) => {
            const events = EVENT_GROUPS.find((one) => one === event.currentTarget.value);
            setRows(ROWS);
            void navigate({ search: ({ events: _, ...old }) => (events ? { ...old, events } : old), replace: true, resetScroll: false });
          }}
          data={[{ value: "", label: t("All events") }, ...EVENT_GROUPS.map((one) => ({ value: one, label: t(GROUPS[one]) }))]}
        />
        <Text size="xs" c="dimmed">
          {t("{{count}} events", { count: wanted.length })}
        </Text>
        <Switch size="xs" label={t("Follow the end")} checked={follows} onChange={(event) => setFollows(event.currentTarget.checked)} />
      </Group>
      {wanted.length === 0 ? (
        <Text size="sm" c="dimmed">
          {data.length === 0 ? t("Nothing has happened yet.") : t("Nothing of this kind has happened.")}
        </Text>
      ) : (
        <div className={classes.scroll} tabIndex={0} role="log" aria-label={t("Events")} ref={scroll}>
          {wanted.length > rows && (
            <Button size="compact-sm" variant="default" mb="xs" onClick={() => (setFollows(false), setRows(rows + 5 * ROWS))}>
              {t("Show {{number}} older events", { number: count(Math.min(wanted.length - rows, 5 * ROWS)) })}
            </Button>
          )}
          <dl className={classes.log}>
            {shown.map((event) => (
              <Line key={event.seq} event={event} />
            ))}
          </dl>
        </div>
      )}
    </div>
  );
});

const Line = memo(function Line({ event }: { event: ClusterEvent }) {
  const { t } = useTranslation();
  return (
    <Fragment>
      <dt title={dateAndTime(event.at)}>{clock(event.at)}</dt>
      <dd data-tone={toneOf(event)}>{wordsFor(event, t)}</dd>
    </Fragment>
  );
});

/** Keep the end in view. Scrolling away from the end stops this, and scrolling back resumes it. */
function useFollowing(shown: readonly ClusterEvent[], follows: boolean, setFollows: (follows: boolean) => void) {
  const [holder, setHolder] = useState<HTMLDivElement | null>(null);
  const last = shown.at(-1)?.seq;

  useLayoutEffect(() => {
    if (holder === null || !follows) return;
    holder.scrollTop = holder.scrollHeight;
  }, [holder, follows, last]);

  useEffect(() => {
    if (holder === null) return;
    // A scroll by the effect above ends at the end, so it does not change the value.
    const onScroll = () => setFollows(holder.scrollHeight - holder.scrollTop - holder.clientHeight < NEAR_PX);
    holder.addEventListener("scroll", onScroll, { passive: true });
    return () => holder.removeEventListener("scroll", onScroll);
  }, [holder, setFollows]);

  return setHolder;
}
