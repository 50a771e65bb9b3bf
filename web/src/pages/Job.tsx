/** One job: its curve beside its machines, then the details of its plan and results beside its events. */
import "@mantine/core/styles/Tabs.css";

import { Group, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { job as jobQuery } from "../api/queries";
import type { Job as JobView } from "../api/types";
import { sentence, Waiting } from "../components/Feedback";
import { Page, Section } from "../components/frame/Page";
import { AnchorLink } from "../components/links";
import { StateBadge } from "../components/StateBadge";
import { dateAndTime } from "../format";
import { Actions } from "./job/Actions";
import { Batch } from "./job/Batch";
import { Curves } from "./job/curves/Curves";
import { Details } from "./job/Details";
import { Failed } from "./job/Failed";
import classes from "./job/Job.module.css";
import { Log } from "./job/log/Log";
import { Machines } from "./job/Machines";
import { useMembers } from "./job/members";
import { Progress } from "./job/Progress";
import { Sparse } from "./job/Sparse";
import { Sweep } from "./job/sweep/Sweep";

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
  const beside = (
    <Group gap="sm">
      <StateBadge state={job.state} />
      {job.state !== "failed" && (
        <Text size="sm" c="dimmed">
          {sentence(job.reason)}
        </Text>
      )}
    </Group>
  );
  return (
    <Page title={job.name} beside={beside} actions={<Actions job={job} />}>
      <Body job={job} />
      <Text size="xs" c="dimmed">
        {job.sweep_id != null && (
          <>
            <AnchorLink to="/jobs/$jobId" params={{ jobId: job.sweep_id }} size="xs">
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

function Body({ job }: { job: JobView }) {
  const { t } = useTranslation();
  const members = useMembers(job);
  const events = (
    <Section title={t("Events")}>
      <Log jobId={job.id} />
    </Section>
  );
  return (
    <>
      {job.state === "failed" && <Failed job={job} members={members ?? []} />}
      <Progress job={job} members={members} />
      {job.spec.kind === "sweep" ? (
        <>
          <Sweep job={job} />
          {events}
        </>
      ) : job.spec.kind === "train" || job.spec.kind === "sparse" ? (
        <>
          <Watched job={job} members={members ?? []} />
          <Details job={job} beside={events} />
        </>
      ) : (
        <>
          <div className={classes.columns}>
            <Section title={t("Batch")}>
              <Batch job={job} />
            </Section>
            {events}
          </div>
          <Details job={job} />
        </>
      )}
    </>
  );
}

/** The curve and the machines; nothing until there is data. */
function Watched({ job, members }: { job: JobView; members: NonNullable<ReturnType<typeof useMembers>> }) {
  const { t } = useTranslation();
  if (job.plan === null && job.step === 0 && job.spec.kind === "train") {
    return (
      <Text size="sm" c="dimmed">
        {job.state === "queued" ? t("Planned when machines are free.") : t("There is no plan.")}
      </Text>
    );
  }
  return (
    <div className={classes.columns}>
      <Curves job={job} />
      {job.spec.kind === "sparse" ? (
        <Section title={t("Sparse model")}>
          <Sparse spec={job.spec} />
        </Section>
      ) : (
        <Machines job={job} members={members} />
      )}
    </div>
  );
}
