/** Filters of the list of jobs, and its columns, groups and order. */
import { Button, Checkbox, NativeSelect, TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import { Link } from "@tanstack/react-router";
import { useEffect, useRef, useState } from "react";
import { useTranslation } from "react-i18next";

import { JOB_KINDS, JOB_STATES } from "../../api/types";
import { fieldsAmong, GROUPING, nameOfColumn, resultsAmong, type ColumnKey, type Run } from "./columns";
import { ColumnsMenu } from "./ColumnsMenu";
import { KINDS } from "./kinds";
import pills from "../Jobs.module.css";
import classes from "./Runs.module.css";
import type { RunsSearch } from "./search";

const TYPING_MS = 250;

interface Props {
  search: RunsSearch;
  runs: readonly Run[];
  columns: readonly ColumnKey[];
  change: (next: Partial<RunsSearch>) => void;
}

export function Toolbar({ search, runs, columns, change }: Props) {
  const { t } = useTranslation();
  const [text, setText] = useState(search.name ?? "");
  const sent = useRef(search.name);
  const find = useDebouncedCallback((name: string) => {
    sent.current = name.trim() || undefined;
    change({ name: sent.current });
  }, TYPING_MS);
  // The browser's Back button changes the URL and then this text; unfinished input stays.
  useEffect(() => {
    if (search.name !== sent.current) setText(search.name ?? "");
    sent.current = search.name;
  }, [search.name]);
  const fields = fieldsAmong(runs);
  const grouping: ColumnKey[] = [...GROUPING, ...fields.differing.map((name): ColumnKey => `spec.${name}`)];
  if (search.by !== undefined && !grouping.includes(search.by as ColumnKey)) grouping.push(search.by as ColumnKey);
  const nameOf = (column: ColumnKey) => (column.startsWith("spec.") ? column.slice("spec.".length) : nameOfColumn(column, [], t));
  const orders = (["name", ...columns] as ColumnKey[]).flatMap((column) => [
    { value: column, label: `${nameOf(column)} ↑` },
    { value: `-${column}`, label: `${nameOf(column)} ↓` },
  ]);
  return (
    <div className={classes.toolbar}>
      <nav className={pills.filter} aria-label={t("Jobs by state")}>
        {[undefined, ...JOB_STATES].map((one) => (
          <Link
            key={one ?? "all"}
            to="/jobs"
            search={({ state: _, ...old }: RunsSearch) => (one === undefined ? old : { ...old, state: one })}
            className={pills.choice}
            data-chosen={one === search.state}
            aria-current={one === search.state ? "page" : undefined}
            activeOptions={{ exact: true }}
          >
            {one === undefined ? t("all") : t(one)}
          </Link>
        ))}
      </nav>
      <div className={classes.row}>
        <NativeSelect
          size="xs"
          w={125}
          aria-label={t("Groups")}
          value={search.by ?? ""}
          onChange={(event) => change({ by: event.currentTarget.value || undefined })}
          data={[{ value: "", label: t("no groups") }, ...grouping.map((value) => ({ value, label: t("by {{column}}", { column: nameOf(value) }) }))]}
        />
        <NativeSelect
          size="xs"
          w={125}
          className={classes.order}
          aria-label={t("Order")}
          value={search.sort ?? ""}
          onChange={(event) => change({ sort: event.currentTarget.value || undefined })}
          data={[{ value: "", label: t("newest first") }, ...orders]}
        />
        <ColumnsMenu
          title={t("Columns")}
          fields={fields}
          results={resultsAmong(runs)}
          shown={columns}
          onChange={(shown) => change({ columns: shown.join(",") || undefined })}
          onReset={search.columns === undefined ? undefined : () => change({ columns: undefined })}
        />
      </div>
      <div className={`${classes.row} ${classes.filters}`}>
        <TextInput
          size="xs"
          w={125}
          type="search"
          aria-label={t("Search by name")}
          placeholder={t("Search by name")}
          value={text}
          onChange={(event) => {
            setText(event.currentTarget.value);
            find(event.currentTarget.value);
          }}
        />
        <NativeSelect
          size="xs"
          aria-label={t("Kind of job")}
          value={search.kind ?? ""}
          onChange={(event) => change({ kind: JOB_KINDS.find((one) => one === event.currentTarget.value) })}
          data={[{ value: "", label: t("all kinds") }, ...JOB_KINDS.map((one) => ({ value: one, label: t(KINDS[one]) }))]}
        />
        <Checkbox size="xs" label={t("Trials of sweeps")} checked={search.trials === true} onChange={(event) => change({ trials: event.currentTarget.checked || undefined })} />
        {search.tag !== undefined && (
          <Button size="compact-xs" variant="default" onClick={() => change({ tag: undefined })} rightSection="×" aria-label={t("All tags")}>
            {search.tag}
          </Button>
        )}
      </div>
    </div>
  );
}
