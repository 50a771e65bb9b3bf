/** Several jobs side by side: results, and the fields in which their job files differ. */
import { Table, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { Fragment, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { comparison } from "../api/queries";
import type { Comparison } from "../api/types";
import { Empty, Waiting } from "../components/Feedback";
import { Page, Section } from "../components/frame/Page";
import { AnchorLink } from "../components/links";
import { StateBadge } from "../components/StateBadge";
import { count, duration, significant } from "../format";
import classes from "./Compare.module.css";
import { nameOfResult } from "./job/figures";

const route = getRouteApi("/compare");

export function Compare() {
  const { t } = useTranslation();
  const { jobs } = route.useSearch();
  const ids = jobs?.split(",") ?? [];
  const { data, error, refetch } = useQuery({ ...comparison(ids), enabled: ids.length > 0 });
  return (
    <Page title={t("Comparison")}>
      {ids.length === 0 ? (
        <Empty title={t("No jobs to compare")}>
          <Text size="sm">{t("Open a job, choose others beside its curves, and follow the link to the comparison.")}</Text>
          <AnchorLink to="/jobs">{t("Jobs")}</AnchorLink>
        </Empty>
      ) : data === undefined ? (
        <Waiting error={error} refetch={refetch} />
      ) : (
        <>
          <Section title={t("Results")}>
            <Results found={data} />
          </Section>
          <Section title={t("Differences of the job files")}>
            <Differences found={data} />
          </Section>
        </>
      )}
    </Page>
  );
}

function Results({ found }: { found: Comparison }) {
  const { t } = useTranslation();
  const { jobs } = found;
  const names = [...new Set(jobs.flatMap((job) => Object.keys(job.results)))];
  const rows: [string, ReactNode[]][] = [
    [t("State"), jobs.map((job) => <StateBadge key={job.id} state={job.state} />)],
    [t("Steps"), jobs.map((job) => `${count(job.step)} / ${count(job.total_steps)}`)],
    [t("Time"), jobs.map((job) => (job.seconds === null ? "–" : duration(job.seconds)))],
    ...names.map((name): [string, ReactNode[]] => [
      nameOfResult(name),
      jobs.map(({ results: { [name]: value } }) => (value === undefined ? "–" : significant(value, 5))),
    ]),
  ];
  return <Columns found={found} label={t("Results")} rows={rows} />;
}

function Differences({ found }: { found: Comparison }) {
  const { t } = useTranslation();
  if (found.differences.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("The job files are equal.")}
      </Text>
    );
  }
  const shown = (value: unknown) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const rows = found.differences.map(({ field, values }): [string, ReactNode[]] => [field, values.map(shown)]);
  return <Columns found={found} label={t("Differences of the job files")} rows={rows} />;
}

interface ColumnsProps {
  found: Comparison;
  /** What the rows are. */
  label: string;
  rows: [string, ReactNode[]][];
}

function Columns({ found, label, rows }: ColumnsProps) {
  return (
    <div className="card scroll" tabIndex={0} role="group" aria-label={label}>
      <Table verticalSpacing="xs" horizontalSpacing="md" className={classes.table}>
        <Table.Thead>
          <Table.Tr>
            <Table.Td />
            {found.jobs.map((job, place) => (
              <Table.Th key={place}>
                <AnchorLink to="/jobs/$jobId" params={{ jobId: job.id }} size="sm">
                  {job.name}
                </AnchorLink>
              </Table.Th>
            ))}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {rows.map(([name, cells]) => (
            <Table.Tr key={name}>
              <Table.Th scope="row">
                <Breakable name={name} />
              </Table.Th>
              {cells.map((cell, place) => (
                <Table.Td key={place}>{cell}</Table.Td>
              ))}
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

/** The name of a field, which may break after its dots. */
function Breakable({ name }: { name: string }) {
  return name.split(/(?<=\.)/).map((part, place) => (
    <Fragment key={place}>
      {place > 0 && <wbr />}
      {part}
    </Fragment>
  ));
}
