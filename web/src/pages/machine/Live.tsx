/** The utilization of a machine now and in the last hour: a small chart for each quantity, all on one time scale. */
import { Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import type { TFunction } from "i18next";
import { useMemo, useState } from "react";
import { useTranslation } from "react-i18next";

import { machineUtilization } from "../../api/queries";
import type { Machine, UtilizationSample } from "../../api/types";
import { TimeChart } from "../../components/chart/TimeChart";
import { Waiting } from "../../components/Feedback";
import { clock, hourAndMinute } from "../../format";
import { figureWords, shareText } from "../../cluster/words";
import { lentBytes } from "../machine";
import classes from "./Machine.module.css";
import { panelsOf, seriesOf, type Figure, type Panel } from "./panels";

const HEIGHT = 118;

export function Live({ machine }: { machine: Machine }) {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(machineUtilization(machine.id));
  const [pointed, setPointed] = useState<number | null>(null);
  const samples = data?.samples;
  const panels = useMemo(() => panelsOf(samples ?? [], lentBytes(machine)), [samples, machine]);
  if (data === undefined || samples === undefined) return <Waiting error={error} refetch={refetch} lines={3} />;
  if (panels.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("The machine has measured nothing in the last hour.")}
      </Text>
    );
  }
  const latest = samples.at(-1)!;
  const [begin, end] = [Date.parse(data.begin) / 1000, Date.parse(data.end) / 1000];
  return (
    <>
      <div className={classes.panels}>
        {panels.map((panel) => (
          <Chart key={panel.id} panel={panel} samples={samples} begin={begin} end={end} pointed={pointed} onPoint={setPointed} />
        ))}
      </div>
      <Text size="xs" c="dimmed">
        {t("The last hour, measured by the machine every 10 s; last at {{time}}. The server keeps it in memory only.", { time: clock(latest.at) })}
      </Text>
    </>
  );
}

interface ChartProps {
  panel: Panel;
  samples: readonly UtilizationSample[];
  begin: number;
  end: number;
  /** Index of the moment under the pointer; null for the last one. */
  pointed: number | null;
  onPoint: (index: number | null) => void;
}

function Chart({ panel, samples, begin, end, pointed, onPoint }: ChartProps) {
  const { t } = useTranslation();
  const { times, values } = useMemo(() => seriesOf(samples, panel.figures), [samples, panel.figures.join()]);
  const series = useMemo(() => values.map((line, ink) => ({ values: line, ink })), [values]);
  const { title, names } = namesOf(t, panel);
  const format = (value: number | null | undefined) => valueWords(t, panel.unit, value);
  const place = pointed !== null && pointed < times.length ? pointed : times.length - 1;
  const range = (line: readonly (number | null)[]) => {
    const known = line.filter((value) => value !== null);
    return { low: format(Math.min(...known)), high: format(Math.max(...known)) };
  };
  const description = panel.figures
    .map((figure, line) =>
      t("{{name}}: {{now}} at last, {{low}} to {{high}} in the last hour", {
        name: panel.figures.length > 1 ? `${title} (${names[figure]})` : title,
        now: format(values[line]!.findLast((value) => value !== null)),
        ...range(values[line]!),
      }),
    )
    .join("; ");
  return (
    <figure className={classes.panel}>
      <figcaption className={classes.head}>
        <Text component="span" size="sm" fw={600}>
          {title}
        </Text>
        {panel.figures.map((figure, line) => (
          <span key={figure} className={classes.value} data-ink={line}>
            {panel.figures.length > 1 && <i aria-hidden />}
            {panel.figures.length > 1 && <small>{names[figure]}</small>}
            {format(values[line]![place])}
          </span>
        ))}
        {pointed !== null && times[place] !== undefined && <small className={classes.when}>{hourAndMinute(times[place] * 1000)}</small>}
      </figcaption>
      <TimeChart
        times={times}
        series={series}
        begin={begin}
        end={end}
        top={panel.top}
        height={HEIGHT}
        description={description}
        axes={{ value: format, time: hourAndMinute, isBinary: panel.unit === "bytes" }}
        sync="machine"
        onPoint={onPoint}
      />
    </figure>
  );
}

function namesOf(t: TFunction, { id }: Panel): { title: string; names: Partial<Record<Figure, string>> } {
  switch (id) {
    case "cpu":
      return { title: t("CPU"), names: { cpu_fraction: t("lent threads"), host_cpu_fraction: t("whole host") } };
    case "gpu":
      return { title: t("GPU"), names: {} };
    case "memory":
      return { title: t("Memory in use"), names: {} };
    case "gpuMemory":
      return { title: t("GPU memory in use"), names: {} };
    case "temperature":
      return { title: t("Temperature"), names: { cpu_celsius: t("CPU"), gpu_celsius: t("GPU") } };
    case "network":
      return { title: t("Network"), names: { received_bytes_per_s: t("in"), sent_bytes_per_s: t("out") } };
  }
}

function valueWords(t: TFunction, unit: Panel["unit"], value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return "–";
  return unit === "share" ? shareText(value) : figureWords(t, unit, value);
}
