/** Fraction of time that a machine computed while it trained. */
import { SegmentedControl, Text } from "@mantine/core";
import { useElementSize } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi, useNavigate } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { machineBusy, machineWork } from "../../api/queries";
import type { Machine } from "../../api/types";
import { Waiting } from "../../components/Feedback";
import { clock, dayOfMonth, hourAndMinute } from "../../format";
import { lines, ticks } from "./chart";
import classes from "./Machine.module.css";
import { HOURS, machineSearch } from "./search";

const route = getRouteApi("/machines/$machineId");
const HEIGHT = 150;
const LEFT = 40;
const BELOW = 22;

export function Busy({ machine }: { machine: Machine }) {
  const { t } = useTranslation();
  const { hours = 1 } = route.useSearch();
  const navigate = useNavigate({ from: "/machines/$machineId" });
  const { data: measured, error, refetch, dataUpdatedAt } = useQuery(machineBusy(machine.id, hours));
  const { data: work } = useQuery(machineWork(machine.id));
  const { ref, width } = useElementSize<HTMLDivElement>();
  const names: Record<(typeof HOURS)[number], string> = { 1: t("1 hour"), 24: t("1 day"), 168: t("1 week") };
  const end = dataUpdatedAt;
  const begin = end - hours * 3_600_000;
  const x = (moment: string) => LEFT + ((Date.parse(moment) - begin) / (end - begin)) * Math.max(1, width - LEFT - 8);
  const y = (share: number) => 8 + (1 - share) * (HEIGHT - BELOW - 8);
  const latest = measured?.at(-1);
  const share = latest === undefined ? null : Math.round(100 * latest.busy_fraction);
  return (
    <>
      <SegmentedControl
        size="xs"
        aria-label={t("How far back")}
        value={String(hours)}
        onChange={(value) => void navigate({ search: machineSearch({ hours: Number(value) }), replace: true })}
        data={HOURS.map((one) => ({ value: String(one), label: names[one] }))}
        w="fit-content"
      />
      {measured === undefined ? (
        <Waiting error={error} refetch={refetch} lines={2} />
      ) : measured.length === 0 ? (
        <Text size="sm" c="dimmed">
          {t("Nothing was measured in this time: measurements begin some steps after the start of a job.")}
        </Text>
      ) : (
        <>
          <Text size="sm">
            {t("It computed for {{share}}% of a step and waited for the rest, as measured at {{time}}.", {
              share,
              time: clock(latest!.at),
            })}
          </Text>
          <div ref={ref}>
            <svg
              className={classes.chart}
              width={width}
              height={HEIGHT}
              role="img"
              aria-label={t("Busy share of a step: {{share}}% at last, {{count}} measurements", { share, count: measured.length })}
            >
              {[0, 0.5, 1].map((level) => (
                <g key={level}>
                  <line className={classes.grid} x1={LEFT} x2={width - 8} y1={y(level)} y2={y(level)} />
                  <text className={classes.label} x={LEFT - 6} y={y(level) + 4} textAnchor="end">
                    {100 * level}%
                  </text>
                </g>
              ))}
              {work?.periods
                .filter((period) => period.ended_at === null || Date.parse(period.ended_at) > begin)
                .map((period) => {
                  const from = Math.max(LEFT, x(period.began_at));
                  const to = period.ended_at === null ? width - 8 : x(period.ended_at);
                  return <rect key={period.began_at} className={classes.period} x={from} width={Math.max(1, to - from)} y={y(1)} height={y(0) - y(1)} />;
                })}
              {lines(measured).map((line) => (
                <polyline key={line[0]!.at} className={classes.line} points={line.map((one) => `${x(one.at)},${y(one.busy_fraction)}`).join(" ")} />
              ))}
              {measured.map((one) => (
                <circle key={one.at} className={classes.dot} cx={x(one.at)} cy={y(one.busy_fraction)} r={2} />
              ))}
              {ticks(begin, end, width < 500 ? 3 : 6).map((moment) => (
                <text key={moment} className={classes.label} x={x(new Date(moment).toISOString())} y={HEIGHT - 5} textAnchor="middle">
                  {hours > 24 ? dayOfMonth(moment) : hourAndMinute(moment)}
                </text>
              ))}
            </svg>
          </div>
          <Text size="xs" c="dimmed">
            {t("The shaded times are those at which it worked.")}
          </Text>
        </>
      )}
    </>
  );
}
