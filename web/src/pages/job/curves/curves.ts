/** Converts measured steps to the columns of the chart. */
import type { Metric } from "../../../api/types";
import type { Curve } from "../../../components/chart/CurveChart";
import { loss, si, significant, stepTime, t } from "../../../format";
import { FIGURES, taskOf, type FigureName } from "../search";

const SPLITS = ["train", "validation", "test"] as const;
export const NAMES = { train: "training", validation: "validation", test: "test" } as const;

/** One job's metrics, and its name in the legend; no name if it is the only one. */
export interface Run {
  name: string | null;
  metrics: readonly Metric[];
}

export interface Drawn {
  steps: number[];
  curves: Curve[];
}

function percent(value: number): string {
  return `${(100 * value).toFixed(1)}%`;
}

/** Format of each figure, for all tasks. */
const WRITTEN: Record<(typeof FIGURES)[number], (value: number) => string> = {
  loss,
  learning_rate: (value) => value.toPrecision(3),
  tokens_per_s: (value) => si(value, "/s"),
  seconds: stepTime,
  gradient_norm: loss,
  accuracy: percent,
  top_5_accuracy: percent,
  f1: (value) => value.toFixed(3),
  auroc: (value) => value.toFixed(3),
  rmse: (value) => significant(value, 3),
  mae: (value) => significant(value, 3),
  r2: (value) => value.toFixed(3),
  perplexity: (value) => significant(value, 3),
};

/** Format of a figure. */
export function formatOf(figure: FigureName): (value: number) => string {
  return WRITTEN[taskOf(figure).figure];
}

/** The figures with measurements: those of `WRITTEN` in order, then those of each task. */
export function figuresIn(metrics: readonly Metric[]): FigureName[] {
  const found = new Set(metrics.flatMap((metric) => Object.keys(metric.data).filter((name) => metric.data[name] != null)));
  const tasks = new Set(metrics.flatMap((metric) => Object.keys((metric.data.tasks as object | undefined) ?? {})));
  return [...FIGURES.filter((name) => found.has(name)), ...([...tasks] as FigureName[])];
}

/**
 * The curves of one figure of several jobs over their common steps.
 *
 * @param smoothing weight of the earlier values in a running mean, from 0 (none) to below 1.
 */
export function curvesOf(runs: readonly Run[], figure: FigureName, smoothing = 0): Drawn {
  const points = runs.flatMap(({ metrics }) => metrics.filter((metric) => valueOf(metric, figure) !== null));
  const steps = [...new Set(points.map((metric) => metric.step))].sort((a, b) => a - b);
  const column = new Map(steps.map((step, index) => [step, index]));
  const curves = runs.flatMap(({ name, metrics }, place) =>
    SPLITS.flatMap((split, order): Curve[] => {
      const own = metrics.filter((metric) => metric.split === split && valueOf(metric, figure) !== null);
      if (own.length === 0) return [];
      const values: (number | null)[] = new Array(steps.length).fill(null);
      for (const metric of own) values[column.get(metric.step)!] = valueOf(metric, figure);
      // The splits of a single job differ by hue. Several jobs have one hue each; their splits differ by their points.
      const ink = runs.length === 1 ? order : place;
      const what = t(NAMES[split]);
      const curve = { label: name === null ? what : t("{{name}}, {{what}}", { name, what }), values, ink, isSparse: split !== "train" };
      if (smoothing === 0 || split !== "train") return [curve];
      return [
        { ...curve, label: t("{{curve}}, as measured", { curve: curve.label }), isFaint: true },
        { ...curve, values: smoothed(values, smoothing) },
      ];
    }),
  );
  return { steps, curves };
}

/** Exponential moving average, bias-corrected: the weight of each value is `weight` times that of the next one. */
export function smoothed(values: readonly (number | null)[], weight: number): (number | null)[] {
  let sum = 0;
  let whole = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value;
    whole = whole * weight + 1;
    return sum / whole;
  });
}

/** Merge the metrics of the whole run with the denser ones of a range of steps. */
export function together(all: readonly Metric[], stretch: readonly Metric[]): Metric[] {
  if (stretch.length === 0) return [...all];
  const name = (metric: Metric) => `${metric.split} ${metric.step}`;
  const known = new Set(all.map(name));
  return [...all, ...stretch.filter((metric) => !known.has(name(metric)))].sort((a, b) => a.step - b.step);
}

/** The loss in one sentence. */
export function summarize(metrics: readonly Metric[]): string {
  const training = metrics.filter((metric) => metric.split === "train");
  const first = training.at(0);
  const last = training.at(-1);
  if (first === undefined || last === undefined) return "";
  const validation = metrics.findLast((metric) => metric.split === "validation");
  const ends = { first: loss(lossOf(first)), from: first.step, last: loss(lossOf(last)), to: last.step };
  if (validation === undefined) return t("Training {{first}} at step {{from}}, {{last}} at step {{to}}.", ends);
  return t("Training {{first}} at step {{from}}, {{last}} at step {{to}}, validation {{validation}} at step {{step}}.", {
    ...ends,
    validation: loss(lossOf(validation)),
    step: validation.step,
  });
}

function valueOf(metric: Metric, figure: FigureName): number | null {
  const from = taskOf(figure).task === undefined ? metric.data : metric.data.tasks;
  const value = (from as Record<string, unknown> | null | undefined)?.[figure];
  return typeof value === "number" ? value : null;
}

function lossOf(metric: Metric): number {
  return metric.data.loss as number;
}
