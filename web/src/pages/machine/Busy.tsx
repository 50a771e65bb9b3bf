/** Fraction of time that a machine computed while it trained. */
import { SegmentedControl, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi, useNavigate } from "@tanstack/react-router";
import { useMemo } from "react";
import { useTranslation } from "react-i18next";

import { machineBusy, machineWork } from "../../api/queries";
import type { Machine } from "../../api/types";
import { TimeChart } from "../../components/chart/TimeChart";
import { Waiting } from "../../components/Feedback";
import { clock, dayOfMonth, hourAndMinute } from "../../format";
import { shareText } from "../../cluster/words";
import { lineOf } from "./chart";
import { HOURS, machineSearch } from "./search";

const route = getRouteApi("/machines/$machineId");
const HEIGHT = 150;

export function Busy({ machine }: { machine: Machine }) {
  const { t } = useTranslation();
  const { hours = 1 } = route.useSearch();
  const navigate = useNavigate({ from: "/machines/$machineId" });
  const { data: measured, error, refetch, dataUpdatedAt } = useQuery(machineBusy(machine.id, hours));
  const { data: work } = useQuery(machineWork(machine.id));
  const names: Record<(typeof HOURS)[number], string> = { 1: t("1 hour"), 24: t("1 day"), 168: t("1 week") };
  const end = dataUpdatedAt / 1000;
  const begin = end - hours * 3600;
  const line = useMemo(() => lineOf(measured ?? []), [measured]);
  const bands = useMemo(
    () => work?.periods.map(({ began_at, ended_at }) => [Date.parse(began_at) / 1000, ended_at === null ? end : Date.parse(ended_at) / 1000] as const) ?? [],
    [work, end],
  );
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
          <TimeChart
            times={line.times}
            series={line.series}
            begin={begin}
            end={end}
            top={1}
            height={HEIGHT}
            description={t("Busy share of a step: {{share}}% at last, {{count}} measurements", { share, count: measured.length })}
            axes={{ value: shareText, time: hours > 24 ? dayOfMonth : hourAndMinute }}
            bands={bands}
            hasPoints
          />
          <Text size="xs" c="dimmed">
            {t("The shaded times are those at which it worked.")}
          </Text>
        </>
      )}
    </>
  );
}
