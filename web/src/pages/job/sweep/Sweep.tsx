/** A sweep: its trials as a picture of parallel coordinates, and as a table, best first. */
import { Table, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { trials as trialsQuery } from "../../../api/queries";
import type { Job, SweepTrials, Trial } from "../../../api/types";
import { useWidth } from "../../../components/chart/useWidth";
import { Waiting } from "../../../components/Feedback";
import { Section } from "../../../components/frame/Page";
import { AnchorLink } from "../../../components/links";
import { StateBadge } from "../../../components/StateBadge";
import { count, significant } from "../../../format";
import { nameOfResult } from "../figures";
import { axesOf, drawnAsLogarithms, lineOf, shortNames, written, type Axis } from "./parallel";
import classes from "./Sweep.module.css";

const HEIGHT_PX = 220;
const NAME_PX = 16;
/** Space between two axes below which their names are in two rows. */
const NARROW_PX = 130;
/** Smallest space between two axes: that of a value beside its axis. */
const LEAST_GAP_PX = 92;
const BOTTOM_PX = 12;
const SIDE_PX = 70;

export function Sweep({ job }: { job: Job }) {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(trialsQuery(job.id));
  if (data === undefined) return <Waiting error={error} refetch={refetch} />;
  return (
    <>
      <Section title={t("Settings and results")}>
        <Coordinates sweep={data} logarithms={drawnAsLogarithms(job.spec)} />
      </Section>
      <Section title={t("Trials")}>
        <Trials sweep={data} />
      </Section>
    </>
  );
}

/** One line for each trial, from axis to axis; the table below has the same values. */
function Coordinates({ sweep, logarithms }: { sweep: SweepTrials; logarithms: readonly string[] }) {
  const { t } = useTranslation();
  const { ref, width: space } = useWidth<HTMLDivElement>();
  const [lit, setLit] = useState<number | null>(null);
  const axes = axesOf(sweep, logarithms);
  const width = Math.max(space, 2 * SIDE_PX + (axes.length - 1) * LEAST_GAP_PX);
  const names = shortNames(axes.map((axis) => axis.name));
  const metric = nameOfResult(sweep.metric);
  const known = sweep.trials.filter((trial) => trial.value !== null);
  const shown = lit === null ? undefined : sweep.trials.find((trial) => trial.number === lit);
  const x = (place: number) => SIDE_PX + (place * (width - 2 * SIDE_PX)) / Math.max(1, axes.length - 1);
  const rows = x(1) - x(0) < NARROW_PX ? 2 : 1;
  const top = (rows + 1) * NAME_PX;
  const y = (height: number) => top + (1 - height) * (HEIGHT_PX - top - BOTTOM_PX);
  return (
    <figure className={classes.figure}>
      <figcaption>
        <Text size="sm" c="dimmed">
          {t("Each line is a trial. On the axis to the right, better values are higher; dashed trials were stopped early.")}
        </Text>
      </figcaption>
      <div ref={ref} className="scroll" tabIndex={0}>
        {space > 0 && (
          <svg
            width={width}
            height={HEIGHT_PX}
            role="img"
            aria-label={t("Settings and {{metric}} of {{number}} trials; the best is trial {{best}}", {
              metric,
              number: known.length,
              best: sweep.best ?? "–",
            })}
            onPointerLeave={() => setLit(null)}
          >
            {[...sweep.trials].reverse().map((trial) => (
              <Line
                key={trial.number}
                path={pathOf(lineOf(trial, axes), x, y)}
                of={trial.number === sweep.best ? "best" : trial.is_stopped ? "stopped" : trial.value === null ? "open" : "over"}
                isLit={trial.number === lit}
                onEnter={() => setLit(trial.number)}
              />
            ))}
            {axes.map((axis, place) => (
              <AxisMarks key={axis.name} axis={axis} name={place === axes.length - 1 ? metric : names[place]!} x={x(place)} y={y} row={place % rows} />
            ))}
          </svg>
        )}
      </div>
      <Text size="sm" c="dimmed" className={classes.lit} aria-hidden>
        {shown === undefined ? t("Point at a line to see its trial.") : wordsOf(shown, sweep, t("trial {{number}}", { number: shown.number }))}
      </Text>
    </figure>
  );
}

function wordsOf(trial: Trial, sweep: SweepTrials, name: string): string {
  const names = shortNames(sweep.fields);
  const settings = sweep.fields.map((field, place) => `${names[place]} ${written(trial.settings[field])}`);
  const value = trial.value === null ? [] : [`${nameOfResult(sweep.metric)} ${written(trial.value)}`];
  return `${name}: ${[...settings, ...value].join(", ")}`;
}

function pathOf(heights: readonly (number | undefined)[], x: (place: number) => number, y: (height: number) => number): string {
  const points = heights.flatMap((height, place) => (height === undefined ? [] : [`${x(place).toFixed(1)} ${y(height).toFixed(1)}`]));
  return `M${points.join("L")}`;
}

interface LineProps {
  path: string;
  of: "best" | "stopped" | "open" | "over";
  isLit: boolean;
  onEnter: () => void;
}

function Line({ path, of, isLit, onEnter }: LineProps) {
  return (
    <g onPointerEnter={onEnter}>
      <path d={path} className={classes.line} data-of={of} data-lit={isLit} />
      <path d={path} className={classes.target} />
    </g>
  );
}

interface MarksProps {
  axis: Axis;
  name: string;
  x: number;
  y: (height: number) => number;
  /** Row of the name, from 0. */
  row: number;
}

function AxisMarks({ axis, name, x, y, row }: MarksProps) {
  return (
    <g>
      <line x1={x} x2={x} y1={y(0)} y2={y(1)} className={classes.axis} />
      <text x={x} y={(row + 1) * NAME_PX - 4} textAnchor="middle" className={classes.name}>
        {name}
      </text>
      {axis.ticks.map(({ at, text }) => (
        <text key={text} x={x + 6} y={y(at)} dominantBaseline="central" className={classes.tick}>
          {text.length > 12 ? `${text.slice(0, 11)}…` : text}
        </text>
      ))}
    </g>
  );
}

function Trials({ sweep }: { sweep: SweepTrials }) {
  const { t } = useTranslation();
  const names = shortNames(sweep.fields);
  const metric = nameOfResult(sweep.metric);
  return (
    <div className="card scroll">
      <Table verticalSpacing="xs" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Trial")}</Table.Th>
            <Table.Th>{t("State")}</Table.Th>
            <Table.Th className="numeric">{t("Steps")}</Table.Th>
            <Table.Th className="numeric">{metric}</Table.Th>
            {sweep.fields.map((field, place) => (
              <Table.Th key={field} className="numeric" title={field}>
                {names[place]}
              </Table.Th>
            ))}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {sweep.trials.map((trial) => (
            <Table.Tr key={trial.number}>
              <Table.Th scope="row" className={classes.trial}>
                <Name trial={trial} />
                {trial.number === sweep.best && ` · ${t("best")}`}
              </Table.Th>
              <Table.Td title={trial.reason}>
                {trial.state === null ? "–" : <StateBadge state={trial.state} />}
                {trial.is_stopped && (
                  <Text size="xs" c="dimmed">
                    {t("stopped early")}
                  </Text>
                )}
              </Table.Td>
              <Table.Td className="numeric">{trial.job_id === null ? "–" : `${count(trial.step)} / ${count(trial.total_steps)}`}</Table.Td>
              <Table.Td className="numeric">{trial.value === null ? "–" : significant(trial.value, 4)}</Table.Td>
              {sweep.fields.map((field) => (
                <Table.Td key={field} className="numeric">
                  {written(trial.settings[field])}
                </Table.Td>
              ))}
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

function Name({ trial }: { trial: Trial }) {
  const { t } = useTranslation();
  const name = t("trial {{number}}", { number: trial.number });
  if (trial.job_id === null) return name;
  return (
    <AnchorLink to="/jobs/$jobId" params={{ jobId: trial.job_id }} size="sm">
      {name}
    </AnchorLink>
  );
}
