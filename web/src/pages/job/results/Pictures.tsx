/** Predictions of the last validation and test: a confusion matrix, or a scatter of true and predicted values. */
import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { pictures } from "../../../api/queries";
import type { Job, Picture } from "../../../api/types";
import { count, si, significant } from "../../../format";
import classes from "./Pictures.module.css";

const SIZE = 320;
const MARGIN = 8;
/** Space for the numbers and names of the axes, to the left of and below the points. */
const LEFT = 58;
const BOTTOM = 40;
/** Maximum length of a class name, in characters, that is written horizontally above its column. */
const MOST_UPRIGHT = 4;

export function Pictures({ job }: { job: Job }) {
  const { t } = useTranslation();
  const { data } = useQuery(pictures(job.id));
  if (data === undefined || data.length === 0) return null;
  return (
    <div className={classes.figures}>
      {data.map((picture) => (
        <figure key={`${picture.split} ${picture.task ?? ""}`} className={classes.figure}>
          <figcaption>
            {picture.task != null && (
              <Text size="sm" fw={600}>
                {t("Task {{task}}", { task: picture.task })}
              </Text>
            )}
            <Text size="sm">
              {picture.split === "test"
                ? t("Final test after step {{step}}: {{samples}} samples", words(picture))
                : t("Validation after step {{step}}: {{samples}} samples", words(picture))}
            </Text>
            <Text size="xs" c="dimmed">
              {picture.confusion != null
                ? t("Each row is a true class, each column a predicted one.")
                : t("True values to the right, predicted values upwards; the line is where both are equal.")}
            </Text>
          </figcaption>
          {picture.confusion != null && <Confusion matrix={picture.confusion} classes={picture.classes} />}
          {picture.points != null && <Scatter points={picture.points} />}
        </figure>
      ))}
    </div>
  );
}

function words({ step, samples }: Picture): { step: string; samples: string } {
  return { step: count(step), samples: count(samples) };
}

interface ConfusionProps {
  matrix: readonly (readonly number[])[];
  /** Names of the classes; without them they are numbered. */
  classes: readonly string[] | null | undefined;
}

function Confusion({ matrix, classes: names }: ConfusionProps) {
  const { t } = useTranslation();
  const nameOf = (place: number) => names?.[place] ?? String(place);
  const isLong = matrix.some((_, place) => nameOf(place).length > MOST_UPRIGHT);
  return (
    <div className={classes.scroll} tabIndex={0} role="group" aria-label={t("Confusion matrix")}>
      <table className={classes.matrix}>
        <thead>
          <tr>
            <td />
            {matrix.map((_, place) => (
              <th key={place} scope="col" title={nameOf(place)} data-long={isLong}>
                <span>{nameOf(place)}</span>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {matrix.map((row, truth) => (
            <tr key={truth}>
              <th scope="row" title={nameOf(truth)}>
                <span>{nameOf(truth)}</span>
              </th>
              {row.map((samples, guess) => (
                <td
                  key={guess}
                  data-right={truth === guess}
                  style={{ "--share": shareOf(samples, row) } as React.CSSProperties}
                  title={t("class {{truth}} predicted as {{guess}}: {{samples}}", { truth: nameOf(truth), guess: nameOf(guess), samples: count(samples) })}
                >
                  {samples === 0 ? "" : count(samples)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Fraction of a class's samples, from 0 to 1. */
export function shareOf(samples: number, row: readonly number[]): number {
  const all = row.reduce((sum, one) => sum + one, 0);
  return all === 0 ? 0 : samples / all;
}

function Scatter({ points }: { points: readonly (readonly number[])[] }) {
  const { t } = useTranslation();
  const { places, low, high, along } = placesOf(points);
  const label = t("True and predicted values of {{number}} samples, from {{low}} to {{high}}", {
    number: count(points.length),
    low: significant(low, 4),
    high: significant(high, 4),
  });
  return (
    <svg viewBox={`${-LEFT} 0 ${SIZE + LEFT} ${SIZE + BOTTOM}`} className={classes.scatter} role="img" aria-label={label}>
      <rect width={SIZE} height={SIZE} />
      {ticksOf(low, high).map((value) => (
        <g key={value}>
          <path d={`M${along(value)} ${SIZE}v-4M0 ${SIZE - along(value)}h4`} />
          <text x={along(value)} y={SIZE + 14} textAnchor="middle">
            {short(value)}
          </text>
          <text x={-6} y={SIZE - along(value)} textAnchor="end" dominantBaseline="central">
            {short(value)}
          </text>
        </g>
      ))}
      <text x={SIZE / 2} y={SIZE + 32} textAnchor="middle">
        {t("true value")}
      </text>
      <text transform={`translate(${12 - LEFT} ${SIZE / 2}) rotate(-90)`} textAnchor="middle">
        {t("predicted value")}
      </text>
      <line x1={MARGIN} y1={SIZE - MARGIN} x2={SIZE - MARGIN} y2={MARGIN} />
      {places.map(([x, y], place) => (
        <circle key={place} cx={x} cy={y} r={2.5} />
      ))}
    </svg>
  );
}

/** Places of the points in the picture, with one scale for both axes. */
export function placesOf(points: readonly (readonly number[])[]): {
  places: [number, number][];
  low: number;
  high: number;
  along: (value: number) => number;
} {
  const values = points.flat();
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const scale = (SIZE - 2 * MARGIN) / (high - low || 1);
  const along = (value: number) => MARGIN + (value - low) * scale;
  return { places: points.map(([truth = 0, guess = 0]) => [along(truth), SIZE - along(guess)]), low, high, along };
}

/** Two to six round numbers from the lowest to the highest value, at equal distances of 1, 2 or 5 times a power of ten. */
export function ticksOf(low: number, high: number): number[] {
  if (!(high > low)) return [low];
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= rough) ?? 10);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, place) => (first + place) * step);
}

/** A tick without the rounding errors of its computation: `0.30000000000000004` is `0.3`. */
function short(value: number): string {
  const digits = Number(value.toPrecision(6));
  return Math.abs(digits) >= 1e5 ? si(digits, "") : String(digits);
}
