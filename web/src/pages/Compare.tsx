/** Several jobs side by side: curves, settings and results, and the fields in which their job files differ. */
import { Table, Text, useComputedColorScheme } from "@mantine/core";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { Fragment, useMemo, useState, type CSSProperties, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { comparison } from "../api/queries";
import type { Comparison } from "../api/types";
import { RUN_COLOURS } from "../components/chart/palette";
import { Empty, Waiting } from "../components/Feedback";
import { Page, Section } from "../components/frame/Page";
import { AnchorLink } from "../components/links";
import { StateBadge } from "../components/StateBadge";
import { count, duration, significant } from "../format";
import { nameOfResult } from "./job/figures";
import classes from "./runs/Compare.module.css";
import { commonFields, Coordinates } from "./runs/Coordinates";
import { goalOf } from "./runs/columns";
import { RunCurves } from "./runs/RunCurves";
import type { ComparedRun } from "./runs/RunLegend";
import { idsIn, MOST_COMPARED, type CompareSearch } from "./runs/search";

const route = getRouteApi("/compare");

export function Compare() {
  const { t } = useTranslation();
  const search = route.useSearch();
  const navigate = route.useNavigate();
  const change = (next: Partial<CompareSearch>) => void navigate({ search: (old) => ({ ...old, ...next }), replace: true, resetScroll: false });
  const all = idsIn(search.jobs);
  const ids = all.slice(0, MOST_COMPARED);
  const { data, error, refetch } = useQuery({ ...comparison(ids), enabled: ids.length > 0, placeholderData: keepPreviousData });
  const [lit, setLit] = useState<number | null>(null);
  const colours = RUN_COLOURS[useComputedColorScheme("light")];
  const runs = useMemo(
    () => (data?.jobs ?? []).map(({ id, name }, place): ComparedRun => ({ id, name: `${name} ${id.slice(-4)}`, colour: colours[place % colours.length]! })),
    [data, colours],
  );
  const remove = (id: string) => {
    setLit(null);
    const without = (ids: readonly string[]) => ids.filter((one) => one !== id).join(",") || undefined;
    change({ jobs: without(all), hidden: without(idsIn(search.hidden)) });
  };
  return (
    <Page title={t("Comparison")} actions={<AnchorLink to="/jobs" size="sm">{t("Choose other jobs")}</AnchorLink>}>
      {ids.length === 0 ? (
        <Empty title={t("No jobs to compare")}>
          <Text size="sm">{t("Choose jobs in the list of jobs, and press Compare.")}</Text>
          <AnchorLink to="/jobs">{t("Jobs")}</AnchorLink>
        </Empty>
      ) : data === undefined ? (
        <Waiting error={error} refetch={refetch} />
      ) : (
        <>
          {all.length > MOST_COMPARED && (
            <Text size="sm" c="dimmed">
              {t("Only the first {{most}} of {{number}} jobs are compared.", { most: MOST_COMPARED, number: all.length })}
            </Text>
          )}
          <Section title={t("Curves")}>
            <RunCurves runs={runs} search={search} change={change} hidden={idsIn(search.hidden)} lit={lit} onLight={setLit} onRemove={remove} />
          </Section>
          {runs.length > 1 && commonFields(data).length > 0 && (
            <Section title={t("Settings and results")}>
              <Coordinates found={data} runs={runs} search={search} change={change} lit={lit} onLight={setLit} />
            </Section>
          )}
          <Section title={t("Results")}>
            <Results found={data} runs={runs} />
          </Section>
          <Section title={t("Differences of the job files")}>
            <Differences found={data} runs={runs} />
          </Section>
        </>
      )}
    </Page>
  );
}

interface Compared {
  found: Comparison;
  runs: readonly ComparedRun[];
}

function Results({ found, runs }: Compared) {
  const { t } = useTranslation();
  const { jobs } = found;
  const names = [...new Set(jobs.flatMap((job) => Object.keys(job.results)))];
  const rows: [string, ReactNode[]][] = [
    [t("State"), jobs.map((job) => <StateBadge key={job.id} state={job.state} />)],
    [t("Steps"), jobs.map((job) => `${count(job.step)} / ${count(job.total_steps)}`)],
    [t("Time"), jobs.map((job) => (job.seconds === null ? "–" : duration(job.seconds)))],
    ...names.map((name): [string, ReactNode[]] => {
      const values = jobs.map(({ results: { [name]: value } }) => value);
      const best = bestIn(name, values);
      return [nameOfResult(name), values.map((value) => (value === undefined ? "–" : <Value value={value} isBest={value === best} />))];
    }),
  ];
  return <Columns runs={runs} label={t("Results")} rows={rows} />;
}

/** The best of the values of a result; undefined if all are equal, or if it is unknown which is better. */
function bestIn(name: string, values: readonly (number | undefined)[]): number | undefined {
  const goal = goalOf(`results.${name}`);
  const numbers = values.filter((value) => value !== undefined);
  if (goal === undefined || new Set(numbers).size < 2) return undefined;
  return goal === "min" ? Math.min(...numbers) : Math.max(...numbers);
}

function Value({ value, isBest }: { value: number; isBest: boolean }) {
  const { t } = useTranslation();
  if (!isBest) return significant(value, 5);
  return (
    <b>
      {significant(value, 5)} <span className={classes.best}>{t("best")}</span>
    </b>
  );
}

function Differences({ found, runs }: Compared) {
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
  return <Columns runs={runs} label={t("Differences of the job files")} rows={rows} />;
}

interface ColumnsProps {
  runs: readonly ComparedRun[];
  /** What the rows are. */
  label: string;
  rows: [string, ReactNode[]][];
}

function Columns({ runs, label, rows }: ColumnsProps) {
  return (
    <div className="card scroll" tabIndex={0} role="group" aria-label={label}>
      <Table verticalSpacing="xs" horizontalSpacing="md" className={classes.table}>
        <Table.Thead>
          <Table.Tr>
            <Table.Td />
            {runs.map(({ id, name, colour }) => (
              <Table.Th key={id} style={{ "--run": colour } as CSSProperties} className={classes.head}>
                <AnchorLink to="/jobs/$jobId" params={{ jobId: id }} size="sm">
                  {name}
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
