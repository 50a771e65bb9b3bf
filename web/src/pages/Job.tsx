/** One job: progress, measurements, placement and results. */
import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useMemo } from "react";
import { useTranslation } from "react-i18next";

import { job as jobQuery, log } from "../api/queries";
import type { Job as JobView, ClusterEvent } from "../api/types";
import { Waiting } from "../components/Feedback";
import { Page, Section } from "../components/frame/Page";
import { AnchorLink } from "../components/links";
import { StateBadge } from "../components/StateBadge";
import { dateAndTime } from "../format";
import { Placement, type Departure } from "../placement/Placement";
import { Actions } from "./job/Actions";
import { Batch } from "./job/Batch";
import { Sparse } from "./job/Sparse";
import { Curves } from "./job/curves/Curves";
import { Log } from "./job/log/Log";
import { Progress } from "./job/Progress";
import { Reality } from "./job/Reality";
import { Artifacts } from "./job/results/Artifacts";
import { Checkpoints } from "./job/results/Checkpoints";
import { Links } from "./job/results/Links";
import { Pictures } from "./job/results/Pictures";
import { Samples } from "./job/results/Samples";
import { Rounds } from "./job/rounds/Rounds";
import { mergingOf, roundsIn } from "./job/rounds/rounds";
import { Sweep } from "./job/sweep/Sweep";
import { Timeline } from "./job/timeline/Timeline";

const route = getRouteApi("/jobs/$jobId");

export function Job() {
  const { t } = useTranslation();
  const { jobId } = route.useParams();
  const { data: job, error, refetch } = useQuery(jobQuery(jobId));
  if (job === undefined) {
    return (
      <Page title={jobId}>
        <Waiting error={error} refetch={refetch} />
      </Page>
    );
  }
  return (
    <Page title={job.name} beside={<StateBadge state={job.state} />} actions={<Actions job={job} />}>
      <Progress job={job} />
      {job.spec.kind === "train" ? (
        <Training job={job} />
      ) : job.spec.kind === "sparse" ? (
        <>
          <Section title={t("Curves")}>
            <Curves job={job} />
          </Section>
          <Section title={t("Sparse model")}>
            <Sparse spec={job.spec} />
          </Section>
        </>
      ) : job.spec.kind === "sweep" ? (
        <Sweep job={job} />
      ) : (
        <Section title={t("Batch")}>
          <Batch job={job} />
        </Section>
      )}
      {job.links.length > 0 && (
        <Section title={t("Afterwards")}>
          <Links job={job} />
        </Section>
      )}
      {job.spec.kind !== "sweep" && (
        <Section title={t("Artifacts")}>
          <Artifacts job={job} />
        </Section>
      )}
      {job.spec.kind === "train" && (
        <Section title={t("Checkpoints")}>
          <Checkpoints job={job} />
        </Section>
      )}
      <Section title={t("Events")}>
        <Log jobId={job.id} />
      </Section>
      <Text size="sm" c="dimmed">
        {job.sweep_id != null && (
          <>
            <AnchorLink to="/jobs/$jobId" params={{ jobId: job.sweep_id }} size="sm">
              {t("Trial {{number}} of a sweep", { number: job.trial?.number ?? 0 })}
            </AnchorLink>
            {" · "}
          </>
        )}
        {job.id} · {t("attempt {{attempt}}", { attempt: job.attempt })} · {t("created {{when}}", { when: dateAndTime(job.created_at) })}
      </Text>
    </Page>
  );
}

function Training({ job }: { job: JobView }) {
  const { t } = useTranslation();
  const { data } = useQuery(log(job.id));
  const departures = useMemo(() => departuresIn(data ?? []), [data]);
  const policy = job.spec.kind === "train" && job.spec.training.synchronization.kind !== "allreduce" ? job.spec.training.synchronization : null;
  const rounds = useMemo(() => (policy === null ? [] : roundsIn(data ?? [], mergingOf(policy))), [data, policy]);
  const first = job.plan?.branches[0];
  const isInLockstep = policy?.kind === "auto" && job.plan !== null && first === undefined;
  return (
    <>
      <Section title={t("Curves")}>
        <Curves job={job} />
      </Section>
      <Pictures job={job} />
      {policy !== null && !isInLockstep && (
        <Section title={t("Rounds")}>
          <Rounds rounds={rounds} />
        </Section>
      )}
      <Section title={t("Placement")}>
        {job.plan === null ? (
          <Text size="sm" c="dimmed">
            {job.state === "queued" ? t("Planned when machines are free.") : t("There is no plan.")}
          </Text>
        ) : (
          <>
            <Placement plan={job.plan} departures={departures} />
            <Reality job={job} plan={job.plan} />
          </>
        )}
      </Section>
      {job.plan !== null && (
        <Section title={first === undefined ? t("One step") : t("One step of branch {{number}}", { number: first.number })}>
          <Timeline job={job} plan={job.plan} />
        </Section>
      )}
      <Samples jobId={job.id} />
    </>
  );
}

/** How each former machine of the job went; the last event counts. */
function departuresIn(events: readonly ClusterEvent[]): Map<string, Departure> {
  const found = new Map<string, Departure>();
  for (const { kind, data } of events) {
    if (kind !== "reformed") continue;
    const { lost = [], left = [] } = data as { lost?: string[]; left?: string[] };
    for (const id of lost) found.set(id, "lost");
    for (const id of left) found.set(id, "left");
  }
  return found;
}
