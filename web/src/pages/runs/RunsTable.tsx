/** The table of jobs: sortable columns, collapsible groups, checkboxes, and labels that are edited in place. */
import { Checkbox, Progress, Table, Text, UnstyledButton } from "@mantine/core";
import type { TFunction } from "i18next";
import { memo, useMemo, useState, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { useOwns } from "../../api/scopes";
import { Ago } from "../../components/Ago";
import { sentence } from "../../components/Feedback";
import { AnchorLink } from "../../components/links";
import { StateBadge } from "../../components/StateBadge";
import { count, dateAndTime, duration, loss, si, significant } from "../../format";
import { translated } from "../../i18n/texts";
import { useNow } from "../../useNow";
import { progressOf, shareOf, speedUnit } from "../job/eta";
import { written } from "../job/sweep/parallel";
import { bestOf, goalOf, grouped, nameOfColumn, sorted, valueOf, type ColumnKey, type Run, type RunGroup } from "./columns";
import { InPlace } from "./InPlace";
import { KINDS } from "./kinds";
import { tagsIn, useRelabel } from "./labels";
import classes from "./Runs.module.css";
import type { RunsSearch } from "./search";

/** Columns of numbers or times, which are aligned at their end. */
const NUMERIC = new Set<ColumnKey>(["loss", "speed", "time", "created"]);

interface Props {
  runs: readonly Run[];
  columns: readonly ColumnKey[];
  sort: { column: ColumnKey; isDescending: boolean } | undefined;
  /** Column of the groups. */
  by: ColumnKey | undefined;
  chosen: ReadonlySet<string>;
  onChoose: (ids: readonly string[], isChosen: boolean) => void;
  onSort: (sort: string | undefined) => void;
}

export function RunsTable({ runs, columns, sort, by, chosen, onChoose, onSort }: Props) {
  const { t } = useTranslation();
  const now = useNow();
  const [closed, setClosed] = useState<ReadonlySet<string>>(new Set());
  const ordered = useMemo(() => (sort === undefined ? [...runs] : sorted(runs, sort.column, sort.isDescending, now)), [runs, sort?.column, sort?.isDescending, sort?.column === "time" && now]);
  const groups = useMemo(() => (by === undefined ? undefined : grouped(ordered, by, now)), [ordered, by]);
  const numeric = useMemo(() => new Set(columns.filter((column) => isNumeric(runs, column))), [runs, columns]);
  const row = (run: Run) => (
    <Row key={run.id} run={run} columns={columns} numeric={numeric} now={run.state === "running" ? now : 0} isChosen={chosen.has(run.id)} onChoose={onChoose} />
  );
  return (
    <div className="card scroll" tabIndex={0} role="group" aria-label={t("Jobs")}>
      <Table className={`stacking ${classes.table}`} verticalSpacing={5} horizontalSpacing="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th className={classes.check}>
              <Choice label={t("Choose all jobs")} runs={runs} chosen={chosen} onChoose={onChoose} />
            </Table.Th>
            {(["name", ...columns] as const).map((column) => (
              <Heading key={column} column={column} shown={columns} isNumeric={numeric.has(column)} sort={sort} onSort={onSort} />
            ))}
          </Table.Tr>
        </Table.Thead>
        {groups === undefined ? (
          <Table.Tbody>{ordered.map(row)}</Table.Tbody>
        ) : (
          groups.map((group) => {
            const name = JSON.stringify(group.value);
            const isOpen = !closed.has(name);
            const toggle = () => setClosed((old) => (isOpen ? new Set([...old, name]) : new Set([...old].filter((one) => one !== name))));
            return (
              <Table.Tbody key={name}>
                <GroupRow group={group} by={by!} columns={columns} numeric={numeric} now={now} isOpen={isOpen} onToggle={toggle} chosen={chosen} onChoose={onChoose} />
                {isOpen && group.runs.map(row)}
              </Table.Tbody>
            );
          })
        )}
      </Table>
    </div>
  );
}

function isNumeric(runs: readonly Run[], column: ColumnKey): boolean {
  if (NUMERIC.has(column)) return true;
  if (!column.startsWith("results.") && !column.startsWith("spec.")) return false;
  return runs.every((run) => ["number", "object"].includes(typeof valueOf(run, column, 0)));
}

interface HeadingProps extends Pick<Props, "sort" | "onSort"> {
  column: ColumnKey;
  shown: readonly ColumnKey[];
  isNumeric: boolean;
}

/** First press: the better or lower values first; second press: the other direction; third press: newest first again. */
function Heading({ column, shown, isNumeric, sort, onSort }: HeadingProps) {
  const { t } = useTranslation();
  const direction = sort?.column !== column ? "none" : sort.isDescending ? "descending" : "ascending";
  const first = goalOf(column) === "max" || column === "created" || column === "progress" ? `-${column}` : column;
  const second = first === column ? `-${column}` : column;
  const present = direction === "none" ? undefined : direction === "descending" ? `-${column}` : column;
  return (
    <Table.Th aria-sort={direction} className={isNumeric ? "numeric" : column === "name" ? classes.name : undefined} title={column.replace(/^(spec|results)\./, "")}>
      <UnstyledButton className={classes.sort} onClick={() => onSort(present === undefined ? first : present === first ? second : undefined)}>
        {nameOfColumn(column, shown, t)}
        <span aria-hidden className={classes.arrow}>
          {direction === "none" ? "" : direction === "descending" ? "↓" : "↑"}
        </span>
      </UnstyledButton>
    </Table.Th>
  );
}

interface ChoiceProps extends Pick<Props, "chosen" | "onChoose"> {
  label: string;
  runs: readonly Run[];
}

function Choice({ label, runs, chosen, onChoose }: ChoiceProps) {
  const number = runs.filter((run) => chosen.has(run.id)).length;
  return (
    <Checkbox
      size="xs"
      aria-label={label}
      checked={number > 0 && number === runs.length}
      indeterminate={number > 0 && number < runs.length}
      onChange={(event) => onChoose(runs.map((run) => run.id), event.currentTarget.checked)}
    />
  );
}

interface GroupRowProps extends Pick<Props, "columns" | "chosen" | "onChoose"> {
  group: RunGroup;
  by: ColumnKey;
  numeric: ReadonlySet<ColumnKey>;
  now: number;
  isOpen: boolean;
  onToggle: () => void;
}

/** Name and number of jobs of a group, its best results, and values that all its jobs share. */
function GroupRow({ group, by, columns, numeric, now, isOpen, onToggle, chosen, onChoose }: GroupRowProps) {
  const { t } = useTranslation();
  const { runs, value } = group;
  const name = value === null ? t("none") : by === "kind" ? t(KINDS[runs[0]!.spec.kind]) : by === "state" ? t(runs[0]!.state) : written(value);
  const label = `${nameOfColumn(by, [], t)}: ${name}`;
  return (
    <Table.Tr className={classes.group}>
      <Table.Td className={classes.check}>
        <Choice label={t("Choose the jobs of {{group}}", { group: label })} runs={runs} chosen={chosen} onChoose={onChoose} />
      </Table.Td>
      <Table.Th scope="rowgroup" className={classes.name}>
        <UnstyledButton className={classes.toggle} aria-expanded={isOpen} onClick={onToggle}>
          <span aria-hidden className={classes.arrow}>
            {isOpen ? "▾" : "▸"}
          </span>
          {label}
          <Text span size="xs" c="dimmed">
            {count(runs.length)}
          </Text>
        </UnstyledButton>
      </Table.Th>
      {columns.map((column) => {
        const best = bestOf(runs, column, now);
        return (
          <Table.Td key={column} data-label={nameOfColumn(column, columns, t)} className={numeric.has(column) ? "numeric" : undefined}>
            {best === undefined ? (
              common(runs, column)
            ) : (
              <span title={t("best")}>
                <span aria-hidden>★ </span>
                <span className={classes.hidden}>{t("best")} </span>
                {numberText(best.value, column, best.run, t)}
              </span>
            )}
          </Table.Td>
        );
      })}
    </Table.Tr>
  );
}

/** The value of a field of the job file that all jobs of a group share. */
function common(runs: readonly Run[], column: ColumnKey): ReactNode {
  if (!column.startsWith("spec.")) return null;
  const values = new Set(runs.map((run) => JSON.stringify(valueOf(run, column, 0))));
  const value = valueOf(runs[0]!, column, 0);
  return values.size === 1 && value !== null ? written(value) : null;
}

function numberText(value: number, column: ColumnKey, run: Run, t: TFunction): string {
  if (column === "speed") return si(value, t(speedUnit(run)));
  return column === "loss" ? loss(value) : significant(value, 4);
}

interface RowProps extends Pick<Props, "columns" | "onChoose"> {
  run: Run;
  numeric: ReadonlySet<ColumnKey>;
  now: number;
  isChosen: boolean;
}

const Row = memo(function Row({ run, columns, numeric, now, isChosen, onChoose }: RowProps) {
  const { t } = useTranslation();
  return (
    <Table.Tr data-chosen={isChosen}>
      <Table.Td className={classes.check}>
        <Checkbox size="xs" aria-label={t("Choose {{name}}", { name: calledOf(run) })} checked={isChosen} onChange={(event) => onChoose([run.id], event.currentTarget.checked)} />
      </Table.Td>
      <Table.Th scope="row" className={classes.name} title={run.id}>
        <AnchorLink to="/jobs/$jobId" params={{ jobId: run.id }} size="sm" fw={600}>
          {run.name}
        </AnchorLink>
        <Text span size="xs" c="dimmed">
          {" "}
          {run.id.slice(-4)}
          {run.spec.kind !== "train" && ` · ${t(KINDS[run.spec.kind])}`}
        </Text>
      </Table.Th>
      {columns.map((column) => (
        <Table.Td key={column} data-label={nameOfColumn(column, columns, t)} data-blank={isBlank(run, column, now)} className={numeric.has(column) ? "numeric" : undefined}>
          <Cell run={run} column={column} now={now} />
        </Table.Td>
      ))}
    </Table.Tr>
  );
});

/** Name and last digits of the id, because several jobs may have the same name. */
function calledOf(run: Run): string {
  return `${run.name} ${run.id.slice(-4)}`;
}

/** Whether the cell shows a dash, which a phone leaves out. */
function isBlank(run: Run, column: ColumnKey, now: number): boolean {
  return column !== "tags" && column !== "note" && valueOf(run, column, now) === null;
}

function Cell({ run, column, now }: { run: Run; column: ColumnKey; now: number }) {
  const { t } = useTranslation();
  switch (column) {
    case "state":
      return <State run={run} />;
    case "progress":
      return <Done run={run} />;
    case "loss":
      return run.loss === null ? "–" : loss(run.loss);
    case "speed":
      return run.tokens_per_s === null ? "–" : si(run.tokens_per_s, t(speedUnit(run)));
    case "time": {
      const seconds = valueOf(run, column, now);
      return typeof seconds === "number" ? duration(Math.max(0, seconds)) : "–";
    }
    case "created":
      return <span title={dateAndTime(run.created_at)}><Ago moment={run.created_at} /></span>;
    case "tags":
      return <Tags run={run} />;
    case "note":
      return <Note run={run} />;
    case "kind":
      return t(KINDS[run.spec.kind]);
    case "sweep":
      return run.sweep_id == null ? (
        "–"
      ) : (
        <AnchorLink to="/jobs/$jobId" params={{ jobId: run.sweep_id }} size="sm">
          {run.sweep_id.slice(-4)}
        </AnchorLink>
      );
    default: {
      const value = valueOf(run, column, now);
      if (value === null) return "–";
      return column.startsWith("results.") ? significant(value as number, 4) : <span className={classes.value}>{written(value)}</span>;
    }
  }
}

function State({ run }: { run: Run }) {
  return (
    <>
      <StateBadge state={run.state} />
      {(run.state === "queued" || run.state === "failed") && (
        <Text size="xs" c="dimmed" className={classes.reason} lineClamp={1} title={translated(run.reason)}>
          {sentence(run.reason)}
        </Text>
      )}
    </>
  );
}

function Done({ run }: { run: Run }) {
  const { t } = useTranslation();
  const { done, total } = progressOf(run);
  return (
    <div className={`${classes.progress} wide`}>
      <Progress
        value={100 * shareOf(run)}
        size="xs"
        color={run.state === "failed" ? "red" : run.state === "succeeded" ? "green" : "lagoon"}
        aria-label={t("{{name}}: progress", { name: run.name })}
      />
      <Text size="xs" c="dimmed">
        {count(done)} / {count(total)}
      </Text>
    </div>
  );
}

function Tags({ run }: { run: Run }) {
  const { t } = useTranslation();
  const relabel = useRelabel();
  const links = run.tags.map((tag) => (
    <AnchorLink key={tag} to="/jobs" search={(old: RunsSearch) => ({ ...old, tag })} size="xs" className={classes.tag}>
      {tag}
    </AnchorLink>
  ));
  const shown = <div className={classes.tags}>{links}</div>;
  if (!useOwns(run.owner)) return shown;
  return (
    <InPlace label={t("Tags of {{name}}", { name: calledOf(run) })} value={run.tags.join(", ")} placeholder={t("baseline, long run")} onSave={(text) => relabel(run.id, { tags: tagsIn(text) })}>
      {run.tags.length > 0 && shown}
    </InPlace>
  );
}

function Note({ run }: { run: Run }) {
  const { t } = useTranslation();
  const relabel = useRelabel();
  const text = (
    <Text size="xs" className={classes.note} lineClamp={2} title={run.note}>
      {run.note}
    </Text>
  );
  if (!useOwns(run.owner)) return text;
  return (
    <InPlace label={t("Note on {{name}}", { name: calledOf(run) })} value={run.note} placeholder={t("Note")} isLong onSave={(note) => relabel(run.id, { note })}>
      {run.note !== "" && text}
    </InPlace>
  );
}
