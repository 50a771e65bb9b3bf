/** Parallel coordinates: one line for each job, from field to field to a result. The tables below have the same values. */
import { NativeSelect, Text } from "@mantine/core";
import type { CSSProperties, KeyboardEvent } from "react";
import { useTranslation } from "react-i18next";

import type { Comparison } from "../../api/types";
import { useWidth } from "../../components/chart/useWidth";
import { nameOfResult } from "../job/figures";
import { axisOf, shortNames, written } from "../job/sweep/parallel";
import { goalOf, type ColumnKey } from "./columns";
import { ColumnsMenu } from "./ColumnsMenu";
import { laidOut } from "./coordinates";
import classes from "./Compare.module.css";
import type { ComparedRun } from "./RunLegend";
import { columnsIn, type CompareSearch } from "./search";

const HEIGHT_PX = 260;
/** Axes that are shown unless others are chosen. */
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
  const { ref, width: space } = useWidth<HTMLDivElement>();
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
  const { width, x, top, bottom, names: nameY, paths } = laidOut(axes, runs.map((_, place) => columns.map((column) => column[place])), space, HEIGHT_PX);
  const wordsOf = (place: number) =>
    `${runs[place]!.name}: ${axes.map((_, axis) => `${names[axis]} ${columns[axis]![place] == null ? "–" : written(columns[axis]![place])}`).join(", ")}`;
  const onKeyDown = (event: KeyboardEvent) => {
    const move = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (move === 0) return;
    event.preventDefault();
    onLight(lit === null ? 0 : (lit + move + runs.length) % runs.length);
  };
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
      <div ref={ref} className="scroll" tabIndex={0} role="group" aria-label={t("Settings and results")} onKeyDown={onKeyDown} onBlur={() => onLight(null)}>
        {space > 0 && (
          <svg width={width} height={HEIGHT_PX} role="img" aria-label={t("Settings and {{result}} of {{number}} jobs", { result: names.at(-1)!, number: runs.length })} onPointerLeave={() => onLight(null)}>
            {runs.map(({ id, colour }, place) => (
              <g key={id} onPointerEnter={() => onLight(place)} style={{ "--run": colour } as CSSProperties}>
                <path d={paths[place]} className={classes.line} data-lit={lit === null ? undefined : lit === place} />
                <path d={paths[place]} className={classes.target} />
              </g>
            ))}
            {axes.map((axis, place) => (
              <g key={place}>
                <line x1={x[place]} x2={x[place]} y1={top} y2={bottom} className={classes.axis} />
                <text x={x[place]} y={nameY[place]} textAnchor="middle" className={classes.axisName}>
                  {names[place]}
                </text>
                {axis.ticks.map(({ at, text }) => (
                  <text key={text} x={x[place]! + 6} y={bottom - at * (bottom - top)} dominantBaseline="central" className={classes.tick}>
                    {text.length > 12 ? `${text.slice(0, 11)}…` : text}
                  </text>
                ))}
              </g>
            ))}
          </svg>
        )}
      </div>
      <Text size="sm" c="dimmed" className={classes.words} role="status">
        {lit === null ? t("Point at a line to see its job.") : wordsOf(lit)}
      </Text>
    </figure>
  );
}
