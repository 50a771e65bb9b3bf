/** Turns measured steps into the columns that the chart draws. */
import type { Metric } from "../../api/types";
import type { Curve } from "../../components/CurveChart";
import { loss } from "../../format";

const NAMES = { train: "training", validation: "validation", test: "test" } as const;

interface Drawn {
  steps: number[];
  curves: Curve[];
  /** What the picture shows, in a sentence. */
  summary: string;
}

export function lossCurves(metrics: readonly Metric[]): Drawn {
  const steps = [...new Set(metrics.map((metric) => metric.step))].sort((a, b) => a - b);
  const column = new Map(steps.map((step, index) => [step, index]));
  const curves: Curve[] = [];
  for (const split of ["train", "validation", "test"] as const) {
    const own = metrics.filter((metric) => metric.split === split);
    if (own.length === 0) continue;
    const values: (number | null)[] = new Array(steps.length).fill(null);
    for (const metric of own) values[column.get(metric.step)!] = lossOf(metric);
    curves.push({ label: NAMES[split], values, isSparse: split !== "train" });
  }
  return { steps, curves, summary: summarize(metrics) };
}

function summarize(metrics: readonly Metric[]): string {
  const training = metrics.filter((metric) => metric.split === "train");
  const first = training.at(0);
  const last = training.at(-1);
  if (first === undefined || last === undefined) return "";
  const validation = metrics.findLast((metric) => metric.split === "validation");
  const tail = validation === undefined ? "" : `, validation ${loss(lossOf(validation))} at step ${validation.step}`;
  return `Training ${loss(lossOf(first))} at step ${first.step}, ${loss(lossOf(last))} at step ${last.step}${tail}.`;
}

function lossOf(metric: Metric): number {
  return metric.data.loss as number;
}
