/** Curves of several runs: one colour for each run, dashes for each split. */
import type { Curve } from "../../components/chart/CurveChart";
import type { Metric } from "../../api/types";
import { curvesOf } from "../job/curves/curves";
import type { FigureName } from "../job/search";

interface NamedRun {
  name: string;
  metrics: readonly Metric[];
  colour: string;
  /** Index among all compared runs, including hidden ones. */
  place: number;
}

/** The curves of one figure; the ink of each is the index of its run. */
export function curvesOfRuns(runs: readonly NamedRun[], figure: FigureName, smoothing: number): { steps: number[]; curves: Curve[] } {
  const { steps, curves } = curvesOf(runs, figure, smoothing);
  const placed = curves.map((curve) => {
    // A single run has one ink for each split.
    const { colour, place } = runs[runs.length === 1 ? 0 : curve.ink]!;
    const isDashed = curve.isSparse === true;
    // Points of a validated step are drawn only if no line connects them.
    const isPoint = isDashed && curve.values.filter((value) => value !== null).length === 1;
    return { ...curve, ink: place, colour, isDashed, isSparse: isPoint };
  });
  return { steps, curves: placed };
}

/** Training and validation values of each run at a step, or at the last step before it; null means the last step. */
export function valuesAt(curves: readonly Curve[], index: number | null): Map<number, { train: number | null; validation: number | null }> {
  const found = new Map<number, { train: number | null; validation: number | null }>();
  for (const { ink, values, isFaint, isDashed } of curves) {
    if (isFaint) continue;
    const known = found.get(ink) ?? { train: null, validation: null };
    const upTo = index === null ? values : values.slice(0, index + 1);
    const value = upTo.findLast((one) => one !== null) ?? null;
    if (isDashed !== true) known.train = value;
    // Test curves come after those of validations, which count.
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
