import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useMemo } from "react";
import { useTranslation } from "react-i18next";

import { log } from "../../api/queries";
import type { ClusterEvent, Job } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { Section } from "../../components/frame/Page";
import { clock } from "../../format";
import { Beat } from "../../placement/Beat";
import { workOf } from "../../placement/live";
import { Placement } from "../../placement/Placement";
import { wordsFor } from "./log/words";
import { departuresOf, type Members } from "./members";

const NOBODY: Members = [];

/** The placement with its machines at work, and the last change of the membership. */
export function Machines({ job, members }: { job: Job; members: Members }) {
  const { t } = useTranslation();
  const { data: events } = useQuery(log(job.id));
  const { plan, measured, state } = job;
  const isLive = state === "running";
  // A machine that leaves after the end of a job is not news about the job.
  const watched = isLive || state === "planning" ? members : NOBODY;
  const change = useMemo(() => lastChangeIn(events ?? []), [events]);
  const bottleneck = plan?.prediction?.bottleneck.sentence;
  const live = useMemo(
    () => ({
      departures: departuresOf(watched, events ?? []),
      work: workOf(isLive ? measured : null, isLive ? (events ?? []) : []),
      beat: <Beat jobId={job.id} />,
      note: (bottleneck !== undefined || change !== undefined) && (
        <>
          {bottleneck !== undefined && (
            <Text size="sm">
              <b>{t("Bottleneck")}</b>: {sentence(bottleneck)}
            </Text>
          )}
          {change !== undefined && (
            <Text size="sm" c="dimmed">
              {clock(change.at)} {wordsFor(change, t)}
            </Text>
          )}
        </>
      ),
    }),
    [watched, events, measured, isLive, job.id, bottleneck, change, t],
  );
  return (
    <Section title={t("Placement")}>
      {plan === null ? (
        <Text size="sm" c="dimmed">
          {state === "queued" ? t("Planned when machines are free.") : t("There is no plan.")}
        </Text>
      ) : (
        <Placement plan={plan} live={live} />
      )}
    </Section>
  );
}

/** The last event after which other machines held parts of the model. */
function lastChangeIn(events: readonly ClusterEvent[]): ClusterEvent | undefined {
  return events.findLast(({ kind, data }) => {
    const { lost = [], joined = [], left = [] } = data as Record<string, string[] | undefined>;
    return kind === "reformed" && lost.length + joined.length + left.length > 0;
  });
}
