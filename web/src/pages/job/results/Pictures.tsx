/** Predictions of the last validation and test: a confusion matrix, or a scatter of true and predicted values. */
import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { pictures } from "../../../api/queries";
import type { Job, Picture } from "../../../api/types";
import { Section } from "../../../components/frame/Page";
import { count } from "../../../format";
import classes from "./Pictures.module.css";

const SIZE = 320;
const MARGIN = 8;

export function Pictures({ job }: { job: Job }) {
  const { t } = useTranslation();
  const { data } = useQuery(pictures(job.id));
  if (data === undefined || data.length === 0) return null;
  return (
    <Section title={t("Predictions")}>
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
          {picture.confusion != null && <Confusion matrix={picture.confusion} />}
          {picture.points != null && <Scatter points={picture.points} />}
        </figure>
      ))}
    </Section>
  );
}

function words({ step, samples }: Picture): { step: string; samples: string } {
  return { step: count(step), samples: count(samples) };
}

function Confusion({ matrix }: { matrix: readonly (readonly number[])[] }) {
  const { t } = useTranslation();
  return (
    <div className={classes.scroll}>
      <table className={classes.matrix}>
        <thead>
          <tr>
            <td />
            {matrix.map((_, place) => (
              <th key={place} scope="col">
                {place}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {matrix.map((row, truth) => (
            <tr key={truth}>
              <th scope="row">{truth}</th>
              {row.map((samples, guess) => (
                <td
                  key={guess}
                  data-right={truth === guess}
                  style={{ "--share": shareOf(samples, row) } as React.CSSProperties}
                  title={t("class {{truth}} predicted as {{guess}}: {{samples}}", { truth, guess, samples: count(samples) })}
                >
                  {samples === 0 ? "" : samples}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Share of a class's samples, from 0 to 1. */
export function shareOf(samples: number, row: readonly number[]): number {
  const all = row.reduce((sum, one) => sum + one, 0);
  return all === 0 ? 0 : samples / all;
}

function Scatter({ points }: { points: readonly (readonly number[])[] }) {
  const { t } = useTranslation();
  const { places, low, high } = placesOf(points);
  return (
    <svg viewBox={`0 0 ${SIZE} ${SIZE}`} className={classes.scatter} role="img" aria-label={t("True and predicted values of {{number}} samples, from {{low}} to {{high}}", { number: count(points.length), low: low.toPrecision(4), high: high.toPrecision(4) })}>
      <line x1={MARGIN} y1={SIZE - MARGIN} x2={SIZE - MARGIN} y2={MARGIN} />
      {places.map(([x, y], place) => (
        <circle key={place} cx={x} cy={y} r={2.5} />
      ))}
    </svg>
  );
}

/** Places of the points in the picture, with one scale for both axes. */
export function placesOf(points: readonly (readonly number[])[]): { places: [number, number][]; low: number; high: number } {
  const values = points.flat();
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const scale = (SIZE - 2 * MARGIN) / (high - low || 1);
  const along = (value: number) => MARGIN + (value - low) * scale;
  return { places: points.map(([truth = 0, guess = 0]) => [along(truth), SIZE - along(guess)]), low, high };
}
