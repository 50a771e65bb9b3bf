import { Button, Group, NativeSelect, NumberInput, Switch, Text } from "@mantine/core";
import { keepPreviousData, useQueries, useQuery } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useId, useMemo } from "react";
import { useTranslation } from "react-i18next";

import { job as jobQuery, metrics, metricsBetween, MOST_POINTS } from "../../../api/queries";
import type { Job } from "../../../api/types";
import { CurveChart, type Zoom } from "../../../components/chart/CurveChart";
import { Smoothing } from "../../../components/chart/Smoothing";
import { Failure, Waiting } from "../../../components/Feedback";
import { Section } from "../../../components/frame/Page";
import { AnchorLink } from "../../../components/links";
import { t } from "../../../format";
import { Compare } from "./Compare";
import classes from "./Curves.module.css";
import { curvesOf, figuresIn, formatOf, summarize, together, type Run } from "./curves";
import { nameOfFigure } from "../figures";
import { stepsOf, type FigureName, type JobSearch } from "../search";

const MOST_COMPARED = 5;

export function Curves({ job }: { job: Job }) {
  const { t, i18n } = useTranslation();
  const search = useSearch({ from: "/jobs/$jobId" });
  const navigate = useNavigate({ from: "/jobs/$jobId" });
  const change = (next: Partial<JobSearch>) =>
    void navigate({ search: (old) => ({ ...old, ...next }), replace: true, resetScroll: false });
  const figure = search.curve ?? "loss";
  const zoom = stepsOf(search.steps);
  const others = comparedIn(search.with, job.id);
  const own = useQuery(metrics(job.id));
  const stretch = useStretch(job.id, zoom, own.data?.length ?? 0);
  const compared = useRuns(others, zoom);
  const runs = useMemo((): Run[] => {
    const metricsOfJob = together(own.data ?? [], stretch ?? []);
    return [{ name: others.length === 0 ? null : job.name, metrics: metricsOfJob }, ...compared.runs];
  }, [own.data, stretch, compared.runs, job.name, others.length]);
  const drawn = useMemo(() => curvesOf(runs, figure, search.smooth), [runs, figure, search.smooth, i18n.language]);
  const figures = useMemo(() => figuresIn(own.data ?? []), [own.data]);

  if (own.data === undefined || own.data.length === 0) {
    return (
      <Section title={t("Curves")}>
        {own.data === undefined ? (
          <Waiting error={own.error} refetch={own.refetch} lines={6} />
        ) : (
          <Text size="sm" c="dimmed">
            {t("The curve begins with the first step.")}
          </Text>
        )}
      </Section>
    );
  }
  const setZoom = (next: Zoom | null) => change({ steps: next === null ? undefined : `${next[0]}-${next[1]}` });
  const name = nameOfFigure(figure);
  const tools = (
    <Group gap="sm">
      <NativeSelect
        size="xs"
        aria-label={t("Figure")}
        value={figure}
        onChange={(event) => change({ curve: figureOf(event.currentTarget.value) })}
        data={figures.map((value) => ({ value, label: nameOfFigure(value) }))}
      />
      <Smoothing value={search.smooth ?? 0} onChange={(smooth) => change({ smooth: smooth || undefined })} />
      <Switch
        size="xs"
        label={t("Log scale")}
        checked={search.scale === "log"}
        onChange={(event) => change({ scale: event.currentTarget.checked ? "log" : undefined })}
      />
    </Group>
  );
  return (
    <Section title={t("Curves")} actions={tools}>
      <div className={classes.curves}>
        {compared.error !== null && <Failure error={compared.error} />}
        <CurveChart
          steps={drawn.steps}
          curves={drawn.curves}
          isLog={search.scale === "log"}
          zoom={zoom}
          onZoom={setZoom}
          description={describe(figure, name, summarize(own.data), zoom, compared.runs)}
          format={formatOf(figure)}
        />
        {(job.plan?.branches.length ?? 0) > 1 && (
          <Text size="sm" c="dimmed">
            {t("Loss and gradient norm are those of branch 0; the table of the rounds has the loss of each branch. Validations are of the merged weights.")}
          </Text>
        )}
        <Group gap="xs" justify="space-between">
          <ZoomFields zoom={zoom} last={drawn.steps.at(-1) ?? 1} onZoom={setZoom} />
          <Compare job={job} others={others} most={MOST_COMPARED} onChange={(ids) => change({ with: ids.join(",") || undefined })} />
        </Group>
        {others.length > 0 && (
          <AnchorLink to="/compare" search={{ jobs: [job.id, ...others].join(",") }} size="sm">
            {t("Compare results and job files")}
          </AnchorLink>
        )}
      </div>
    </Section>
  );
}

/** Inputs for the first and last step: zooming by keyboard. */
function ZoomFields({ zoom, last, onZoom }: { zoom: Zoom | null; last: number; onZoom: (zoom: Zoom | null) => void }) {
  const { t } = useTranslation();
  const [from, to] = zoom ?? [1, last];
  const set = (first: unknown, end: unknown) => {
    const [low, high] = [Number(first), Number(end)];
    if (Number.isInteger(low) && Number.isInteger(high) && low >= 0 && low < high) onZoom([low, high]);
  };
  return (
    <Group gap="xs" align="center" title={t("Drag over the curve to zoom, double-click to see all.")}>
      <Field label={t("From step")} value={from} onCommit={(value) => set(value, to)} />
      <Field label={t("to step")} value={to} onCommit={(value) => set(from, value)} />
      <Button size="xs" variant="default" disabled={zoom === null} onClick={() => onZoom(null)}>
        {t("All steps")}
      </Button>
    </Group>
  );
}

function Field({ label, value, onCommit }: { label: string; value: number; onCommit: (value: string) => void }) {
  const id = useId();
  return (
    <Group gap={6} wrap="nowrap">
      <Text component="label" htmlFor={id} size="xs" c="dimmed">
        {label}
      </Text>
      <NumberInput
        // A new value from outside replaces unconfirmed input.
        key={value}
        id={id}
        size="xs"
        w={72}
        min={0}
        hideControls
        allowDecimal={false}
        defaultValue={value}
        onBlur={(event) => event.currentTarget.value !== String(value) && onCommit(event.currentTarget.value)}
        onKeyDown={(event) => event.key === "Enter" && onCommit(event.currentTarget.value)}
      />
    </Group>
  );
}

/** The metrics of the zoomed range, if those of the whole run are thinned out. */
function useStretch(id: string, zoom: Zoom | null, known: number) {
  const [first, last] = zoom ?? [0, 0];
  const { data } = useQuery({
    ...metricsBetween(id, first, last),
    enabled: zoom !== null && known >= MOST_POINTS / 2,
    placeholderData: keepPreviousData,
  });
  return zoom === null ? undefined : data;
}

/** Other jobs with their names and metrics. */
function useRuns(ids: readonly string[], zoom: Zoom | null) {
  return useQueries({
    queries: ids.flatMap((id) => [jobQuery(id), zoom === null ? metrics(id) : metricsBetween(id, ...zoom)]) as ReturnType<typeof metrics>[],
    combine: (results) => ({
      error: results.find((result) => result.error !== null)?.error ?? null,
      runs: ids.flatMap((_, index): Run[] => {
        const named = results[2 * index]?.data as unknown as Job | undefined;
        const measured = results[2 * index + 1]?.data;
        return named === undefined || measured === undefined ? [] : [{ name: `${named.name} ${named.id.slice(-4)}`, metrics: measured }];
      }),
    }),
  });
}

function comparedIn(text: string | undefined, own: string): string[] {
  const ids = new Set((text ?? "").split(",").filter((id) => id !== "" && id !== own));
  return [...ids].slice(0, MOST_COMPARED);
}

function figureOf(value: string): FigureName | undefined {
  return value === "loss" ? undefined : (value as FigureName);
}

/** The text alternative of the picture. */
function describe(figure: FigureName, name: string, summary: string, zoom: Zoom | null, runs: readonly Run[]): string {
  const over = t("{{figure}} over steps.", { figure: name });
  const where = zoom === null ? "" : t("Steps {{first}} to {{last}}.", { first: zoom[0], last: zoom[1] });
  const others = runs.length === 0 ? "" : t("Beside it: {{names}}.", { names: runs.map((run) => run.name).join(", ") });
  return [over, figure === "loss" ? summary : "", where, others].filter((part) => part !== "").join(" ");
}
