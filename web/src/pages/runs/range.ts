/** Ranges of axes that outliers do not stretch. */

/** Minimum number of values of a curve for it to have outliers. */
const LEAST_VALUES = 5;
/** Distance of the fences from the quartiles, in interquartile ranges (Tukey, Exploratory Data Analysis, 1977). */
const FENCE = 1.5;
/** Space above and below the curves, as a fraction of their extent. */
const PADDING = 0.05;

export type Range = readonly [low: number, high: number];

/**
 * The range of the vertical axis without outliers: the union of the ranges of all curves, each within the fences of
 * Tukey. Fences are those of a single curve, so a curve far from the others is not an outlier.
 *
 * @returns the range and the number of values outside of it; null if there is no value, or no outlier.
 */
export function rangeWithoutOutliers(curves: readonly (readonly (number | null)[])[]): { range: Range; outside: number } | null {
  const known = curves.map((values) => values.filter((value): value is number => value !== null && Number.isFinite(value)));
  const inner = known.flatMap(innerRange);
  if (inner.length === 0) return null;
  const [low, high] = [Math.min(...inner), Math.max(...inner)];
  const space = (high - low) * PADDING || Math.abs(high) * PADDING || 1;
  const range: Range = [low - space, high + space];
  const outside = known.reduce((sum, values) => sum + values.filter((value) => value < range[0] || value > range[1]).length, 0);
  return outside === 0 ? null : { range, outside };
}

/** Lowest and highest value within the fences; none if there is no value. */
function innerRange(values: readonly number[]): number[] {
  if (values.length === 0) return [];
  const ascending = [...values].sort((a, b) => a - b);
  if (values.length < LEAST_VALUES) return [ascending[0]!, ascending.at(-1)!];
  const [first, third] = [quantile(ascending, 0.25), quantile(ascending, 0.75)];
  const fence = FENCE * (third - first);
  const inside = ascending.filter((value) => value >= first - fence && value <= third + fence);
  return [inside[0]!, inside.at(-1)!];
}

/** Quantile of sorted values, interpolated linearly between the two nearest. */
function quantile(ascending: readonly number[], share: number): number {
  const place = share * (ascending.length - 1);
  const [below, above] = [ascending[Math.floor(place)]!, ascending[Math.ceil(place)]!];
  return below + (above - below) * (place - Math.floor(place));
}
