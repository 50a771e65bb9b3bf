/** Geometry of parallel coordinates: one axis for each searched field and one for the metric, one line for each trial. */
import type { Job, SweepTrials } from "../../../api/types";
import type { Axis } from "../../../components/chart/coordinates";

/** Ratio of the highest to the lowest value from which an axis of positive numbers is logarithmic. */
const LOG_RATIO = 50;

export function written(value: unknown): string {
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));
  return typeof value === "string" ? value : JSON.stringify(value);
}

interface Shape {
  /** Whether higher values are lower on the axis. */
  isFlipped?: boolean;
  /** Whether the values were drawn from a range of logarithms. */
  isLog?: boolean;
}

/** The axis of these values: linear or logarithmic for numbers; otherwise one place for each value. */
export function axisOf(name: string, values: readonly unknown[], { isFlipped = false, isLog: isDrawnLog = false }: Shape = {}): Axis {
  const numbers = values.filter((value): value is number => typeof value === "number" && Number.isFinite(value));
  if (numbers.length < values.length || numbers.length === 0) return listed(name, values);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const isLog = low > 0 && (isDrawnLog || high / low >= LOG_RATIO);
  const scaled = (value: number) => (isLog ? Math.log(value) : value);
  const extent = scaled(high) - scaled(low);
  const at = (value: unknown) => {
    if (typeof value !== "number" || !Number.isFinite(value)) return undefined;
    const share = extent === 0 ? 0.5 : (scaled(value) - scaled(low)) / extent;
    return isFlipped ? 1 - share : share;
  };
  const marks = extent === 0 ? [low] : [low, high];
  return { name, at, ticks: marks.map((value) => ({ at: at(value)!, text: written(value) })) };
}

function listed(name: string, values: readonly unknown[]): Axis {
  const texts = [...new Set(values.map(written))];
  const height = (place: number) => (texts.length === 1 ? 0.5 : place / (texts.length - 1));
  const at = (value: unknown) => {
    const place = texts.indexOf(written(value));
    return place < 0 ? undefined : height(place);
  };
  return { name, at, ticks: texts.map((text, place) => ({ at: height(place), text })) };
}

/** Names of the fields whose logarithms a sweep draws. */
export function drawnAsLogarithms(spec: Job["spec"]): string[] {
  if (spec.kind !== "sweep") return [];
  return Object.entries(spec.fields).flatMap(([name, drawn]) => (drawn.log_uniform == null ? [] : [name]));
}

/**
 * The axes of a sweep. Better values are higher on the last axis, which shows the metric. @param logarithms Names of
 * the fields whose logarithms were drawn.
 */
export function axesOf({ fields, goal, metric, trials }: SweepTrials, logarithms: readonly string[]): Axis[] {
  const values = trials.map((trial) => trial.value).filter((value) => value !== null);
  return [
    ...fields.map((name) => axisOf(name, trials.map((trial) => trial.settings[name]), { isLog: logarithms.includes(name) })),
    axisOf(metric, values, { isFlipped: goal === "min" }),
  ];
}

/** Last parts of the fields' names, or the whole names if the last parts are equal. */
export function shortNames(names: readonly string[]): string[] {
  const last = names.map((name) => name.split(".").at(-1)!);
  return last.map((short, place) => (last.filter((one) => one === short).length === 1 ? short : names[place]!));
}
