/** All jobs, newest first. */
import { Button, Progress, Table, Text } from "@mantine/core";
import { useInfiniteQuery } from "@tanstack/react-query";
import { getRouteApi, Link } from "@tanstack/react-router";

import { jobs } from "../api/queries";
import { JOB_STATES, type Job, type JobState } from "../api/types";
import { Empty, Failure, Loading, sentence } from "../components/Feedback";
import { AnchorLink, ButtonLink } from "../components/links";
import { Page } from "../components/Page";
import { StateBadge } from "../components/StateBadge";
import { ago, count, loss, si } from "../format";
import { useNow } from "../useNow";
import classes from "./Jobs.module.css";
import { progressOf, shareOf, speedUnit } from "./job/eta";

const route = getRouteApi("/jobs");

export function Jobs() {
  const { state } = route.useSearch();
  const query = useInfiniteQuery(jobs(state));
  const all = query.data?.pages.flatMap((page) => page.jobs);
  return (
    <Page
      title="Jobs"
      actions={
        <ButtonLink to="/submit">
          Submit a job
        </ButtonLink>
      }
    >
      <Filter state={state} />
      {all === undefined ? (
        query.error === null ? (
          <Loading />
        ) : (
          <Failure error={query.error} retry={() => void query.refetch()} />
        )
      ) : all.length === 0 ? (
        <Empty title={state === undefined ? "No job yet" : `No job is ${state}`}>
          <Text>A job trains a model on the machines of the pool.</Text>
        </Empty>
      ) : (
        <JobTable jobs={all} />
      )}
      {query.hasNextPage && (
        <Button variant="default" loading={query.isFetchingNextPage} onClick={() => void query.fetchNextPage()}>
          Show older jobs
        </Button>
      )}
    </Page>
  );
}

function Filter({ state }: { state: JobState | undefined }) {
  return (
    <nav className={classes.filter} aria-label="Jobs by state">
      {[undefined, ...JOB_STATES].map((one) => (
        <Link
          key={one ?? "all"}
          to="/jobs"
          search={one === undefined ? {} : { state: one }}
          className={classes.choice}
          data-chosen={one === state}
          aria-current={one === state ? "page" : undefined}
        >
          {one ?? "all"}
        </Link>
      ))}
    </nav>
  );
}

function JobTable({ jobs: all }: { jobs: readonly Job[] }) {
  const now = useNow();
  return (
    <div className="card scroll">
      <Table className="stacking" verticalSpacing="sm" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>Job</Table.Th>
            <Table.Th>State</Table.Th>
            <Table.Th>Progress</Table.Th>
            <Table.Th className="numeric">Loss</Table.Th>
            <Table.Th className="numeric">Speed</Table.Th>
            <Table.Th className="numeric">Created</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {all.map((job) => (
            <Row key={job.id} job={job} now={now} />
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

function Row({ job, now }: { job: Job; now: number }) {
  const { done, total, unit } = progressOf(job);
  return (
    <Table.Tr>
      <Table.Td data-label="Job">
        <AnchorLink to="/jobs/$jobId" params={{ jobId: job.id }} size="sm" fw={600}>
          {job.name}
        </AnchorLink>
        <Text size="xs" c="dimmed">
          {job.id}
        </Text>
      </Table.Td>
      <Table.Td data-label="State">
        <StateBadge state={job.state} />
        {(job.state === "queued" || job.state === "failed") && (
          <Text size="xs" c="dimmed" mt={2} maw={280} lineClamp={2} title={job.reason}>
            {sentence(job.reason)}
          </Text>
        )}
      </Table.Td>
      <Table.Td miw={150} data-label="Progress">
        <Progress
          className="wide"
          value={100 * shareOf(job)}
          size="sm"
          color={job.state === "failed" ? "red" : job.state === "succeeded" ? "green" : "lagoon"}
          aria-label={`${job.name}: progress`}
        />
        <Text size="xs" c="dimmed" mt={4}>
          {count(done)} of {count(total)} {unit}
        </Text>
      </Table.Td>
      <Table.Td className="numeric" data-label="Loss">{job.loss === null ? "–" : loss(job.loss)}</Table.Td>
      <Table.Td className="numeric" data-label="Speed">
        {job.state === "running" && job.tokens_per_s !== null ? si(job.tokens_per_s, speedUnit(job)) : "–"}
      </Table.Td>
      <Table.Td className="numeric" data-label="Created">{ago(job.created_at, now)}</Table.Td>
    </Table.Tr>
  );
}
