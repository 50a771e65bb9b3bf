/** The last hour of each machine as a small chart, all on one scale: from 0 to 100% of its lent GPU or threads. */
import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { memo, useMemo } from "react";
import { useTranslation } from "react-i18next";

import { utilization } from "../../api/queries";
import type { MachineSummary, MachineUtilization } from "../../api/types";
import { Waiting } from "../../components/Feedback";
import { MachineLink } from "../../components/MachineLink";
import { TimeChart } from "../../components/chart/TimeChart";
import { count } from "../../format";
import { busiest, meanOf } from "./busiest";
import classes from "./Multiples.module.css";
import { busyOf, shareText, workWords } from "../words";

/** One value for each minute. */
const POINTS = 60;
/** With more machines, only the busiest are drawn. */
const MOST = 60;
const HEIGHT = 56;
/** Up to this number, charts are large. */
const MOST_LARGE = 9;
const LARGE_HEIGHT = 128;

export function Multiples({ machines }: { machines: readonly MachineSummary[] }) {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(utilization(POINTS));
  const drawn = useMemo(() => busiest(machines, data?.machines ?? {}, MOST), [machines, data]);
  const times = useMemo(() => {
    const begin = Date.parse(data?.begin ?? "") / 1000;
    return Array.from({ length: POINTS }, (_, place) => begin + (place + 0.5) * (data?.interval_s ?? 0));
  }, [data]);
  if (data === undefined) return <Waiting error={error} refetch={refetch} lines={4} />;
  const without = machines.length - machines.filter(({ id }) => data.machines[id] !== undefined).length;
  const isLarge = drawn.length <= MOST_LARGE;
  return (
    <section className="card" aria-label={t("Utilization of the machines")}>
      <Text size="sm" c="dimmed" className={classes.note!}>
        {t("Each chart shows the last hour, from 0 to 100% of the lent GPU or of the lent CPU threads.")}
        {machines.length > MOST && ` ${t("The {{number}} busiest of {{all}} machines are drawn.", { number: count(drawn.length), all: count(machines.length) })}`}
        {without > 0 && ` ${t("Machines that reported nothing in the last minute: {{number}}.", { number: count(without) })}`}
      </Text>
      <ul className={classes.grid} data-large={isLarge}>
        {drawn.map((machine) => (
          <Chart key={machine.id} machine={machine} used={data.machines[machine.id]} times={times} height={isLarge ? LARGE_HEIGHT : HEIGHT} />
        ))}
      </ul>
    </section>
  );
}

interface ChartProps {
  machine: MachineSummary;
  used: MachineUtilization | undefined;
  times: readonly number[];
  height: number;
}

const Chart = memo(function Chart({ machine, used, times, height }: ChartProps) {
  const { t } = useTranslation();
  const series = useMemo(() => [{ values: used?.busy ?? [], ink: 0 }], [used]);
  const now = busyOf(used?.latest);
  const mean = meanOf(used?.busy ?? []);
  const half = (times[1]! - times[0]!) / 2;
  return (
    <li className={classes.cell}>
      <div className={classes.head}>
        <MachineLink id={machine.id} name={machine.name} fw={600} />
        <strong>{now === undefined ? "–" : shareText(now)}</strong>
      </div>
      <Text size="xs" c="dimmed" truncate>
        {workWords(t, machine)}
      </Text>
      <div className={classes.chart} style={{ minHeight: height + 2 }}>
        {used === undefined ? (
          <Text size="xs" c="dimmed" ta="center" py="lg">
            {t("no report")}
          </Text>
        ) : (
          <TimeChart
            times={times}
            series={series}
            begin={times[0]! - half}
            end={times.at(-1)! + half}
            top={1}
            height={height}
            description={t("{{name}}: {{now}} in use now, {{mean}} on average in the last hour", {
              name: machine.name,
              now: now === undefined ? "–" : shareText(now),
              mean: mean === null ? "–" : shareText(mean),
            })}
            hasPoints={used.busy.filter((value) => value !== null).length < 3}
          />
        )}
      </div>
    </li>
  );
});
