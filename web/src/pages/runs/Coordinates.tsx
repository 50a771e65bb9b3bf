/** The fields and one result of the compared jobs as parallel coordinates. The tables below have the same values. */
import { NativeSelect, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Comparison } from "../../api/types";
import { ParallelCoordinates } from "../../components/chart/ParallelCoordinates";
import { nameOfResult } from "../job/figures";
import { axisOf, shortNames, written } from "../job/sweep/parallel";
import { goalOf, type ColumnKey } from "./columns";
import { ColumnsMenu } from "./ColumnsMenu";
import classes from "./Compare.module.css";
import type { ComparedRun } from "./RunLegend";
import { columnsIn, type CompareSearch } from "./search";

const HEIGHT_PX = 260;
/** Axes that are shown by default. */
const FIRST_AXES = 6;

interface Props {
  found: Comparison;
  runs: readonly ComparedRun[];
  search: CompareSearch;
  change: (next: Partial<CompareSearch>) => void;
  lit: number | null;
  onLight: (place: number | null) => void;
}

/** Fields that differ and that all compared jobs have. */
export function commonFields({ differences }: Comparison): string[] {
  return differences.filter(({ values }) => values.every((value) => value !== null)).map(({ field }) => field);
}

export function Coordinates({ found, runs, search, change, lit, onLight }: Props) {
  const { t } = useTranslation();
  const common = commonFields(found);
  const chosen = columnsIn(search.axes ?? "").flatMap((column) => (column.startsWith("spec.") ? [column.slice("spec.".length)] : []));
  const fields = chosen.length > 0 ? common.filter((field) => chosen.includes(field)) : common.slice(0, FIRST_AXES);
  const results = [...new Set(found.jobs.flatMap((job) => Object.keys(job.results)))];
  const result = results.find((name) => name === search.result) ?? results.find((name) => name.startsWith("validation_")) ?? results[0];
  const valuesOf = (field: string) => found.differences.find((one) => one.field === field)!.values;
  const columns = [...fields.map(valuesOf), found.jobs.map((job) => (result === undefined ? null : job.results[result]))];
  const axes = [
    ...fields.map((field, place) => axisOf(field, columns[place]!)),
    axisOf(result ?? "", columns.at(-1)!.filter((value) => value != null), { isFlipped: goalOf(`results.${result ?? ""}`) !== "max" }),
  ];
  const names = [...shortNames(fields), result === undefined ? "" : nameOfResult(result)];
  const lines = runs.map(({ id, name, colour }, place) => {
    const values = columns.map((column) => column[place]);
    const words = values.map((value, axis) => `${names[axis]} ${value == null ? "–" : written(value)}`).join(", ");
    return { id, colour, values, words: `${name}: ${words}` };
  });
  return (
    <figure className={classes.figure}>
      <figcaption className={classes.controls}>
        <NativeSelect
          size="xs"
          label={t("Result")}
          value={result ?? ""}
          onChange={(event) => change({ result: event.currentTarget.value })}
          data={results.map((value) => ({ value, label: nameOfResult(value) }))}
        />
        <ColumnsMenu
          title={t("Axes")}
          fields={{ differing: common, equal: [] }}
          results={[]}
          isOfFields
          shown={fields.map((field): ColumnKey => `spec.${field}`)}
          onChange={(shown) => change({ axes: shown.join(",") || undefined })}
          onReset={search.axes === undefined ? undefined : () => change({ axes: undefined })}
        />
        <Text size="xs" c="dimmed" className={classes.explained}>
          {t("Each line is a job. On the axis to the right, better values are higher. The arrow keys go from line to line.")}
        </Text>
      </figcaption>
      <ParallelCoordinates
        axes={axes}
        names={names}
        lines={lines}
        height={HEIGHT_PX}
        label={t("Settings and results")}
        description={t("Settings and {{result}} of {{number}} jobs", { result: names.at(-1)!, number: runs.length })}
        hint={t("Point at a line to see its job.")}
        lit={lit}
        onLight={onLight}
      />
    </figure>
  );
}
