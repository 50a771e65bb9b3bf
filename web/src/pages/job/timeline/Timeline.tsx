/** One step: microbatches over machines and time, as the simulator of the schedule predicts it. */
import { Group, Table, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { memo, useId, useMemo, useRef, useState } from "react";
import { useTranslation } from "react-i18next";

import { timeline as timelineQuery } from "../../../api/queries";
import type { Job, Plan, PlanTimeline, TimelineCell } from "../../../api/types";
import { TextAlternative } from "../../../components/chart/TextAlternative";
import { useWidth } from "../../../components/chart/useWidth";
import { Waiting } from "../../../components/Feedback";
import { count, difference, stepTime } from "../../../format";
import { translated } from "../../../i18n/texts";
import { Playhead } from "./Playhead";
import { bubbleOf, rowsOf, ticksOf, type Row } from "./timeline";
import classes from "./Timeline.module.css";

const LABEL_PX = 96;
/** Half the width of a label of the axis. */
const HALF_TICK_PX = 22;
const AXIS_PX = 22;
/** Cells narrower than this have no space for their number. */
const NUMBER_PX = 14;

export function Timeline({ job, plan }: { job: Job; plan: Plan }) {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(timelineQuery(job.id, job.attempt, plan.epoch));
  return (
    <div className={classes.holder}>
      {data !== undefined ? (
        <Laid job={job} plan={plan} timeline={data} />
      ) : (
        <Waiting error={error} refetch={refetch} lines={3} />
      )}
      {data?.step_s == null && data !== undefined && (
        <Text size="sm" c="dimmed">
          {t("Nothing can be predicted: {{problem}}.", { problem: translated(data.problem ?? "") })}
        </Text>
      )}
    </div>
  );
}

function Laid({ job, plan, timeline }: { job: Job; plan: Plan; timeline: PlanTimeline }) {
  const { t } = useTranslation();
  const rows = useMemo(() => rowsOf(plan, timeline), [plan, timeline]);
  const step = timeline.step_s;
  if (step == null) return null;
  const measured = job.measured?.measured_step_s;
  const bubble = `${Math.round(100 * bubbleOf(rows, step))}%`;
  const predicted = t("Predicted: {{time}}", { time: stepTime(step) });
  return (
    <>
      <Text size="sm">
        {predicted}
        {measured !== undefined && ` · ${t("measured: {{time}} ({{difference}})", { time: stepTime(measured), difference: difference(measured, step) })}`}
        {rows.length > 0 && ` · ${t("machines wait {{share}} of it", { share: bubble })}`}
      </Text>
      {rows.length === 0 ? (
        <Text size="sm" c="dimmed">
          {t("It has {{number}} cells, too many to draw.", { number: count(timeline.cell_count) })}
        </Text>
      ) : (
        <>
          <Picture rows={rows} timeline={timeline} step={step} plan={plan} measured={measured} isRunning={job.state === "running"} />
          <Figures rows={rows} step={step} />
        </>
      )}
    </>
  );
}

interface PictureProps {
  rows: Row[];
  timeline: PlanTimeline;
  step: number;
  plan: Plan;
  /** Measured seconds of a step. */
  measured: number | undefined;
  isRunning: boolean;
}

function Picture({ rows, timeline, step, plan, measured, isRunning }: PictureProps) {
  const { t } = useTranslation();
  const { ref, width } = useWidth<HTMLDivElement>();
  const [lit, setLit] = useState<string | null>(null);
  const line = useRef<SVGLineElement>(null);
  const whole = Math.max(width, 340);
  const height = rows.length > 24 ? 14 : rows.length > 12 ? 20 : 28;
  const total = rows.length * height + AXIS_PX;
  const microbatches = new Set(timeline.cells.map((cell) => cell.microbatch)).size;
  return (
    <figure className={classes.figure}>
      <Group component="figcaption" gap="md" className={classes.legend}>
        <Key name={t("forward")} of="F" />
        <Key name={t("backward")} of="B" />
        <Key name={t("update of weights")} of="update" />
        <Key name={t("waiting")} of="waiting" />
        {timeline.transfers.length > 0 && <Key name={t("on its way")} of="transfer" />}
      </Group>
      <div ref={ref} className={classes.scroll} tabIndex={0} role="group" aria-label={t("One step")}>
        {width > 0 && (
          <svg
            width={whole}
            height={total}
            role="img"
            aria-label={t("Timeline of one step: {{microbatches}} microbatches over {{machines}} machines, {{time}}", {
              microbatches,
              machines: rows.length,
              time: stepTime(step),
            })}
            onPointerLeave={() => setLit(null)}
            onPointerMove={(event) => setLit((event.target as Element).getAttribute("data-words"))}
          >
            <Drawing rows={rows} timeline={timeline} step={step} whole={whole} height={height} />
            <line ref={line} className={classes.playhead} x1={LABEL_PX} x2={LABEL_PX} y1={0} y2={rows.length * height} />
          </svg>
        )}
      </div>
      {width > 0 && (
        <Playhead plan={plan} rows={rows} step={step} measured={measured} line={line} span={whole - LABEL_PX - 8} isRunning={isRunning} />
      )}
      <Text size="sm" c="dimmed" className={classes.lit} aria-hidden>
        {lit ?? t("Point at a cell for its times.")}
      </Text>
    </figure>
  );
}

interface DrawingProps {
  rows: Row[];
  timeline: PlanTimeline;
  step: number;
  whole: number;
  height: number;
}

/** Memoized: hovering over cells must not render thousands of them again. */
const Drawing = memo(function Drawing({ rows, timeline, step, whole, height }: DrawingProps) {
  const hatch = useId();
  const x = (moment: number) => LABEL_PX + (moment / step) * (whole - LABEL_PX - 8);
  const place = new Map(rows.map((row, index) => [`${row.stage} ${row.member}`, index]));
  const bottom = rows.length * height;
  return (
    <>
      <defs>
        <pattern id={hatch} width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
          <rect width="1.5" height="6" className={classes.hatch} />
        </pattern>
      </defs>
      {ticksOf(step).map((tick) => (
        <g key={tick}>
          <line x1={x(tick)} x2={x(tick)} y1={0} y2={bottom} className={classes.grid} />
          <text x={Math.min(x(tick), whole - HALF_TICK_PX)} y={bottom + 15} className={classes.tick} textAnchor={tick === 0 ? "start" : "middle"}>
            {tick === 0 ? "0" : stepTime(tick)}
          </text>
        </g>
      ))}
      {rows.map((row, index) => (
        <g key={`${row.stage} ${row.member}`} data-hue={row.stage % 6} transform={`translate(0 ${index * height})`}>
          <text x={0} y={height / 2} className={classes.label} dominantBaseline="central">
            {row.name.length > 12 ? `${row.name.slice(0, 11)}…` : row.name}
          </text>
          <rect x={x(0)} y={1} width={x(step) - x(0)} height={height - 2} fill={`url(#${hatch})`} data-words={`${row.name}: ${stepTime(row.waiting_s)}`} />
          {row.cells.map((cell) => (
            <Cell key={`${cell.kind}${cell.microbatch}`} cell={cell} name={row.name} x={x} height={height} />
          ))}
          {row.update !== undefined && (
            <rect
              x={x(row.update.start_s)}
              y={1}
              width={Math.max(1.5, x(row.update.stop_s) - x(row.update.start_s))}
              height={height - 2}
              className={classes.update}
              data-words={`${row.name}: ${stepTime(row.update.start_s)} – ${stepTime(row.update.stop_s)}`}
            />
          )}
        </g>
      ))}
      {timeline.transfers.map(({ microbatch, kind, source, target, start_s, stop_s }) => {
        const from = place.get(source.join(" "));
        const to = place.get(target.join(" "));
        if (from === undefined || to === undefined) return null;
        const edge = (row: number, isUp: boolean) => row * height + (isUp ? 2 : height - 2);
        return (
          <line
            key={`${kind}${microbatch} ${source.join()}`}
            x1={x(start_s)}
            y1={edge(from, to < from)}
            x2={x(stop_s)}
            y2={edge(to, to > from)}
            className={classes.transfer}
          />
        );
      })}
    </>
  );
});

function Cell({ cell, name, x, height }: { cell: TimelineCell; name: string; x: (moment: number) => number; height: number }) {
  const left = x(cell.start_s);
  const width = Math.max(0.75, x(cell.stop_s) - left);
  const words = `${name}: ${cell.kind}${cell.microbatch}, ${stepTime(cell.start_s)} – ${stepTime(cell.stop_s)} (${stepTime(cell.stop_s - cell.start_s)})`;
  return (
    <>
      <rect x={left} y={1} width={width} height={height - 2} className={classes.cell} data-kind={cell.kind} data-words={words} />
      {width >= NUMBER_PX && height >= 20 && (
        <text x={left + width / 2} y={height / 2} className={classes.number} data-kind={cell.kind} textAnchor="middle" dominantBaseline="central">
          {cell.microbatch}
        </text>
      )}
    </>
  );
}

function Key({ name, of }: { name: string; of: string }) {
  return (
    <span className={classes.key}>
      <i data-of={of} data-hue="0" aria-hidden />
      {name}
    </span>
  );
}

/** The timeline as a table. */
function Figures({ rows, step }: { rows: Row[]; step: number }) {
  const { t } = useTranslation();
  return (
    <TextAlternative title={t("The same as a table")}>
      <Table className="stacking" verticalSpacing={6} horizontalSpacing="sm" mt="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Machine")}</Table.Th>
            <Table.Th className="numeric">{t("Microbatches")}</Table.Th>
            <Table.Th className="numeric">{t("forward")}</Table.Th>
            <Table.Th className="numeric">{t("backward")}</Table.Th>
            <Table.Th className="numeric">{t("waiting")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {rows.map((row) => (
            <Table.Tr key={`${row.stage} ${row.member}`}>
              <Table.Td data-label={t("Machine")}>
                <span>
                  {row.name} · {t("stage {{stage}}", { stage: row.stage + 1 })}
                </span>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Microbatches")}>
                <span>{row.cells.length / 2}</span>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("forward")}>
                <span>{stepTime(row.forward_s)}</span>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("backward")}>
                <span>{stepTime(row.backward_s)}</span>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("waiting")}>
                <span>
                  {stepTime(row.waiting_s)} ({Math.round((100 * row.waiting_s) / step)}%)
                </span>
              </Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </TextAlternative>
  );
}
