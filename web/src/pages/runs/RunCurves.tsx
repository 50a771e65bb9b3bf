/** Curves of all compared runs in one chart, with a legend that shows the values under the pointer. */
import { Button, NativeSelect, Switch, Text } from "@mantine/core";
import { keepPreviousData, useQueries } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { useTranslation } from "react-i18next";

import { metrics, metricsBetween } from "../../api/queries";
import { CurveChart, type Zoom } from "../../components/chart/CurveChart";
import { Smoothing } from "../../components/chart/Smoothing";
import { Failure } from "../../components/Feedback";
import { figuresIn, formatOf } from "../job/curves/curves";
import { nameOfFigure } from "../job/figures";
import { stepsOf, type FigureName } from "../job/search";
import { curvesOfRuns, valuesWithin } from "./curves";
import { RunLegend, type ComparedRun } from "./RunLegend";
import classes from "./Compare.module.css";
import { rangeWithoutOutliers } from "./range";
import type { CompareSearch } from "./search";

const HEIGHT = 380;

interface Props {
  runs: readonly ComparedRun[];
  search: CompareSearch;
  change: (next: Partial<CompareSearch>) => void;
  hidden: readonly string[];
  /** Place of the run that stands out. */
  lit: number | null;
  onLight: (place: number | null) => void;
  onRemove: (id: string) => void;
}

export function RunCurves({ runs, search, change, hidden, lit, onLight, onRemove }: Props) {
  const { t, i18n } = useTranslation();
  const [point, setPoint] = useState<number | null>(null);
  const figure = search.curve ?? "loss";
  const zoom = stepsOf(search.steps);
  const { measured, error } = useQueries({
    queries: runs.map(({ id }) => ({ ...(zoom === null ? metrics(id) : metricsBetween(id, ...zoom)), placeholderData: keepPreviousData })) as ReturnType<typeof metrics>[],
    combine: (results) => ({ measured: results.map((result) => result.data), error: results.find((result) => result.error !== null)?.error ?? null }),
  });
  const smoothing = search.smooth ?? 0;
  const shown = runs.flatMap(({ id, name, colour }, place) => (hidden.includes(id) ? [] : [{ name, colour, place, metrics: measured[place] ?? [] }]));
  const drawn = useMemo(
    () => curvesOfRuns(shown, figure, smoothing),
    // Names and colours belong to the runs.
    [measured, runs, hidden.join(), figure, smoothing, i18n.language],
  );
  const figures = useMemo(() => figuresIn(measured.flatMap((one) => one ?? [])), [measured]);
  const inner = useMemo(() => rangeWithoutOutliers(valuesWithin(drawn.steps, drawn.curves, zoom)), [drawn, zoom?.[0], zoom?.[1]]);
  const isCut = inner !== null && search.outliers !== true && search.scale !== "log";
  const litInks = useMemo(() => (lit === null ? undefined : new Set([lit])), [lit]);
  const setZoom = (next: Zoom | null) => change({ steps: next === null ? undefined : `${next[0]}-${next[1]}` });
  const name = nameOfFigure(figure);
  if (figures.length === 0 && error === null && measured.every((one) => one !== undefined)) {
    return (
      <Text size="sm" c="dimmed">
        {t("The curve begins with the first step.")}
      </Text>
    );
  }
  return (
    <div className={classes.curves}>
      <div className={classes.controls}>
        <NativeSelect
          size="xs"
          label={t("Figure")}
          value={figure}
          onChange={(event) => change({ curve: event.currentTarget.value === "loss" ? undefined : (event.currentTarget.value as FigureName) })}
          data={(figures.includes(figure) ? figures : [figure, ...figures]).map((value) => ({ value, label: nameOfFigure(value) }))}
        />
        <Smoothing value={smoothing} onChange={(smooth) => change({ smooth: smooth || undefined })} />
        <Switch size="xs" label={t("Log scale")} checked={search.scale === "log"} onChange={(event) => change({ scale: event.currentTarget.checked ? "log" : undefined })} />
        <Switch
          size="xs"
          label={t("Cut off outliers")}
          checked={search.outliers !== true && search.scale !== "log"}
          disabled={search.scale === "log"}
          onChange={(event) => change({ outliers: event.currentTarget.checked ? undefined : true })}
        />
        {zoom !== null && (
          <Button size="xs" variant="default" onClick={() => setZoom(null)}>
            {t("All steps")}
          </Button>
        )}
      </div>
      {error !== null && <Failure error={error} />}
      <div className={classes.chart}>
        <div>
          <CurveChart
            steps={drawn.steps}
            curves={drawn.curves}
            isLog={search.scale === "log"}
            zoom={zoom}
            onZoom={setZoom}
            range={isCut ? inner.range : undefined}
            lit={litInks}
            onPoint={setPoint}
            height={HEIGHT}
            description={t("{{figure}} of {{number}} jobs over steps; the table beside it has their values.", { figure: name, number: shown.length })}
            format={formatOf(figure)}
          />
          <Text size="xs" c="dimmed">
            {t("Solid: training. Dashed: validation and test.")}{" "}
            {isCut ? t("Values outside of the axis: {{number}}.", { number: inner.outside }) : ""} {t("Drag over the curve to zoom, double-click to see all.")}
          </Text>
        </div>
        <RunLegend
          runs={runs}
          curves={drawn.curves}
          step={point === null ? null : (drawn.steps[point] ?? null)}
          point={point}
          format={formatOf(figure)}
          hidden={hidden}
          lit={lit}
          onLight={onLight}
          onHide={(ids) => change({ hidden: ids.join(",") || undefined })}
          onRemove={onRemove}
        />
      </div>
    </div>
  );
}
