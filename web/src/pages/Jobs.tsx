/** All jobs, newest first. */
import "@mantine/core/styles/Checkbox.css";

import { Button, Checkbox, Group, NativeSelect, Progress, Table, Text, TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import { keepPreviousData, useInfiniteQuery } from "@tanstack/react-query";
import { getRouteApi, Link } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { jobs, type JobFilter } from "../api/queries";
import { JOB_KINDS, JOB_STATES, type Job, type JobKind } from "../api/types";
import { Empty, Failure, Loading, sentence } from "../components/Feedback";
import { Page } from "../components/frame/Page";
import { AnchorLink, ButtonLink } from "../components/links";
import { StateBadge } from "../components/StateBadge";
import { ago, count, loss, si } from "../format";
import { useNow } from "../useNow";
import { progressOf, shareOf, speedUnit } from "./job/eta";
import classes from "./Jobs.module.css";

const route = getRouteApi("/jobs");
const TYPING_MS = 250;

/** Keys of `t`. */
const KINDS: Record<JobKind, string> = { train: "training", generate: "answers of a model", embed: "vectors of texts", sparse: "sparse model", sweep: "search of settings" };

export function Jobs() {
  const { t } = useTranslation();
  const search = route.useSearch();
  const query = useInfiniteQuery({ ...jobs(search), placeholderData: keepPreviousData });
  const all = query.data?.pages.flatMap((page) => page.jobs);
  const isFiltered = Object.keys(search).length > 0;
  return (
    <Page title={t("Jobs")} actions={<ButtonLink to="/submit">{t("Submit a job")}</ButtonLink>}>
      <Filter search={search} />
      {all === undefined ? (
        query.error === null ? (
          <Loading />
        ) : (
          <Failure error={query.error} retry={() => void query.refetch()} />
        )
      ) : all.length === 0 ? (
        <Empty title={isFiltered ? t("No job is like this") : t("No job yet")}>
          <Text>{isFiltered ? t("There may be jobs of other states, kinds or names.") : t("A job trains a model on the machines that joined.")}</Text>
        </Empty>
      ) : (
        <JobTable jobs={all} />
      )}
      {query.hasNextPage && (
        <Button variant="default" loading={query.isFetchingNextPage} onClick={() => void query.fetchNextPage()}>
          {t("Show older jobs")}
        </Button>
      )}
    </Page>
  );
}

function Filter({ search }: { search: JobFilter }) {
  const { t } = useTranslation();
  const navigate = route.useNavigate();
  const change = (next: Partial<JobFilter>) => void navigate({ search: (old) => ({ ...old, ...next }), replace: true });
  const find = useDebouncedCallback((name: string) => change({ name: name.trim() || undefined }), TYPING_MS);
  return (
    <Group justify="space-between" align="center" gap="sm">
      <nav className={classes.filter} aria-label={t("Jobs by state")}>
        {[undefined, ...JOB_STATES].map((one) => (
          <Link
            key={one ?? "all"}
            to="/jobs"
            search={({ state: _, ...old }) => (one === undefined ? old : { ...old, state: one })}
            className={classes.choice}
            data-chosen={one === search.state}
            aria-current={one === search.state ? "page" : undefined}
            activeOptions={{ exact: true }}
          >
            {one === undefined ? t("all") : t(one)}
          </Link>
        ))}
      </nav>
      <Group gap="xs">
        <NativeSelect
          size="xs"
          aria-label={t("Kind of job")}
          value={search.kind ?? ""}
          onChange={(event) => change({ kind: JOB_KINDS.find((one) => one === event.currentTarget.value) })}
          data={[{ value: "", label: t("all kinds") }, ...JOB_KINDS.map((one) => ({ value: one, label: t(KINDS[one]) }))]}
        />
        <TextInput
          size="xs"
          type="search"
          aria-label={t("Search by name")}
          placeholder={t("Search by name")}
          defaultValue={search.name ?? ""}
          onChange={(event) => find(event.currentTarget.value)}
        />
        <Checkbox
          size="xs"
          label={t("Trials of sweeps")}
          checked={search.trials === true}
          onChange={(event) => change({ trials: event.currentTarget.checked || undefined })}
        />
        {search.tag !== undefined && (
          <Button size="compact-xs" variant="default" onClick={() => change({ tag: undefined })}>
            {t("All tags")}
          </Button>
        )}
      </Group>
    </Group>
  );
}

function JobTable({ jobs: all }: { jobs: readonly Job[] }) {
  const { t } = useTranslation();
  const now = useNow();
  return (
    <div className="card scroll">
      <Table className="stacking" verticalSpacing="sm" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Job")}</Table.Th>
            <Table.Th>{t("State")}</Table.Th>
            <Table.Th>{t("Progress")}</Table.Th>
            <Table.Th className="numeric">{t("Loss")}</Table.Th>
            <Table.Th className="numeric">{t("Speed")}</Table.Th>
            <Table.Th className="numeric">{t("Created")}</Table.Th>
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
  const { t } = useTranslation();
  const { done, total, unit } = progressOf(job);
  const numbers = { done: count(done), total: count(total) };
  return (
    <Table.Tr>
      <Table.Td data-label={t("Job")}>
        <AnchorLink to="/jobs/$jobId" params={{ jobId: job.id }} size="sm" fw={600}>
          {job.name}
        </AnchorLink>
        <Text size="xs" c="dimmed">
          {job.id}
          {job.spec.kind !== "train" && ` · ${t(KINDS[job.spec.kind])}`}
          {job.group != null && ` · ${job.group}`}
          {job.tags.map((tag) => (
            <span key={tag}>
              {" · "}
              <AnchorLink to="/jobs" search={(old: JobFilter) => ({ ...old, tag })} size="xs">
                {tag}
              </AnchorLink>
            </span>
          ))}
        </Text>
      </Table.Td>
      <Table.Td data-label={t("State")}>
        <StateBadge state={job.state} />
        {(job.state === "queued" || job.state === "failed") && (
          <Text size="xs" c="dimmed" mt={2} maw={280} lineClamp={2} title={job.reason}>
            {sentence(job.reason)}
          </Text>
        )}
      </Table.Td>
      <Table.Td miw={150} data-label={t("Progress")}>
        <Progress
          className="wide"
          value={100 * shareOf(job)}
          size="sm"
          color={job.state === "failed" ? "red" : job.state === "succeeded" ? "green" : "lagoon"}
          aria-label={t("{{name}}: progress", { name: job.name })}
        />
        <Text size="xs" c="dimmed" mt={4}>
          {unit === "steps" ? t("Step {{done}} of {{total}}", numbers) : t("Rows: {{done}} of {{total}}", numbers)}
        </Text>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Loss")}>
        {job.loss === null ? "–" : loss(job.loss)}
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Speed")}>
        {job.state === "running" && job.tokens_per_s !== null ? si(job.tokens_per_s, speedUnit(job)) : "–"}
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Created")}>
        {ago(job.created_at, now)}
      </Table.Td>
    </Table.Tr>
  );
}
