/** Curves of several runs: one colour for each run, dashes for each split. */
import type { Curve } from "../../components/chart/CurveChart";
import type { Metric } from "../../api/types";
import { curvesOf } from "../job/curves/curves";
import type { FigureName } from "../job/search";

interface NamedRun {
  name: string;
  metrics: readonly Metric[];
  colour: string;
  /** Place among all compared runs, those that are hidden included. */
  place: number;
}

/** The curves of one figure; the ink of each is the place of its run. */
export function curvesOfRuns(runs: readonly NamedRun[], figure: FigureName, smoothing: number): { steps: number[]; curves: Curve[] } {
  const { steps, curves } = curvesOf(runs, figure, smoothing);
  const placed = curves.map((curve) => {
    // The inks of a single run are those of its splits.
    const { colour, place } = runs[runs.length === 1 ? 0 : curve.ink]!;
    const isDashed = curve.isSparse === true;
    // Points of a validated step are drawn only if no line connects them.
    const isPoint = isDashed && curve.values.filter((value) => value !== null).length === 1;
    return { ...curve, ink: place, colour, isDashed, isSparse: isPoint };
  });
  return { steps, curves: placed };
}

/** Values of each run's training and validation at a step, or at its last step before; of its last step for null. */
export function valuesAt(curves: readonly Curve[], index: number | null): Map<number, { train: number | null; validation: number | null }> {
  const found = new Map<number, { train: number | null; validation: number | null }>();
  for (const { ink, values, isFaint, isDashed } of curves) {
    if (isFaint) continue;
    const known = found.get(ink) ?? { train: null, validation: null };
    const upTo = index === null ? values : values.slice(0, index + 1);
    const value = upTo.findLast((one) => one !== null) ?? null;
    if (isDashed !== true) known.train = value;
    // The curve of a test follows that of validations, which counts.
    else known.validation ??= value;
    found.set(ink, known);
  }
  return found;
}

/** The curves with their values outside of these steps left out. */
export function valuesWithin(steps: readonly number[], curves: readonly Curve[], zoom: readonly [number, number] | null): (number | null)[][] {
  if (zoom === null) return curves.map(({ values }) => values);
  return curves.map(({ values }) => values.filter((_, place) => steps[place]! >= zoom[0] && steps[place]! <= zoom[1]));
}
