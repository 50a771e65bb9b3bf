/** One job: where it is, how it goes, where it runs, what it made. */
import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";

import { job as jobQuery } from "../api/queries";
import type { Job as JobView } from "../api/types";
import { Failure, Loading } from "../components/Feedback";
import { Page, Section } from "../components/Page";
import { StateBadge } from "../components/StateBadge";
import { dateAndTime } from "../format";
import { Placement } from "../placement/Placement";
import { Actions } from "./job/Actions";
import { Artifacts } from "./job/Artifacts";
import { Curves } from "./job/Curves";
import { Log } from "./job/Log";
import { Progress } from "./job/Progress";
import { Reality } from "./job/Reality";

const route = getRouteApi("/jobs/$jobId");

export function Job() {
  const { jobId } = route.useParams();
  const { data: job, error, refetch } = useQuery(jobQuery(jobId));
  if (job === undefined) {
    return (
      <Page title={jobId}>{error === null ? <Loading /> : <Failure error={error} retry={() => void refetch()} />}</Page>
    );
  }
  return (
    <Page title={job.name} beside={<StateBadge state={job.state} />} actions={<Actions job={job} />}>
      <Progress job={job} />
      {job.spec.kind === "train" && (
        <>
          <Section title="Loss">
            <Curves job={job} />
          </Section>
          <Section title="Placement">
            <PlacementOf job={job} />
          </Section>
        </>
      )}
      <Section title="Artifacts">
        <Artifacts job={job} />
      </Section>
      <Section title="Log">
        <Log jobId={job.id} />
      </Section>
      <Text size="sm" c="dimmed">
        {job.id} · attempt {job.attempt} · created {dateAndTime(job.created_at)}
      </Text>
    </Page>
  );
}

function PlacementOf({ job }: { job: JobView }) {
  if (job.plan !== null) {
    return (
      <>
        <Reality job={job} plan={job.plan} />
        <Placement plan={job.plan} />
      </>
    );
  }
  return <Text size="sm" c="dimmed">{job.state === "queued" ? "Planned when machines are free." : "There is no plan."}</Text>;
}
