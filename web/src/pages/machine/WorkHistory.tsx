/** Periods of work of a machine, with the parts of models that it held. */
import { Button, Table, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { machineWork } from "../../api/queries";
import { Waiting } from "../../components/Feedback";
import { count, dateAndTime, duration } from "../../format";
import { Holder } from "../../cluster/MachineTable";
import { partWords } from "../../cluster/words";

const FEW = 8;

export function WorkHistory({ machineId }: { machineId: string }) {
  const { t } = useTranslation();
  const { data: work, error, refetch } = useQuery(machineWork(machineId));
  const [showsAll, setShowsAll] = useState(false);
  if (work === undefined) return <Waiting error={error} refetch={refetch} lines={2} />;
  // While a job is planned, its machines hold no part of a model.
  const periods = work.periods.filter((period) => period.num_layers !== null);
  if (periods.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("It has not worked for a job or a deployment yet.")}
      </Text>
    );
  }
  const shown = showsAll ? periods : periods.slice(0, FEW);
  return (
    <>
      <Text size="sm">
        {t("{{steps}} steps, {{microbatches}} microbatches, {{samples}} samples, in {{time}} at work", {
          steps: count(work.steps),
          microbatches: count(work.microbatches),
          samples: count(work.samples),
          time: duration(work.seconds),
        })}
        {!work.is_complete && ` ${t("(its latest work only)")}`}
      </Text>
      <div className="scroll">
        <Table className="stacking" aria-label={t("Work")}>
          <Table.Thead>
            <Table.Tr>
              <Table.Th>{t("Work")}</Table.Th>
              <Table.Th>{t("Part")}</Table.Th>
              <Table.Th>{t("From")}</Table.Th>
              <Table.Th className="numeric">{t("Time")}</Table.Th>
              <Table.Th className="numeric">{t("Steps")}</Table.Th>
              <Table.Th className="numeric">{t("Microbatches")}</Table.Th>
              <Table.Th className="numeric">{t("Training samples")}</Table.Th>
            </Table.Tr>
          </Table.Thead>
          <Table.Tbody>
            {shown.map((period) => (
              <Table.Tr key={period.began_at + (period.job_id ?? period.deployment_id)}>
                <Table.Td data-label={t("Work")}>
                  <Holder held={period} />
                </Table.Td>
                <Table.Td data-label={t("Part")}>
                  <Text size="sm">{partWords(t, period) ?? "–"}</Text>
                </Table.Td>
                <Table.Td data-label={t("From")}>
                  <Text size="sm">{dateAndTime(period.began_at)}</Text>
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Time")}>
                  {duration(period.seconds)}
                  {period.ended_at === null && ` ${t("so far")}`}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Steps")}>
                  {count(period.steps)}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Microbatches")}>
                  {count(period.steps * (period.microbatches ?? 0))}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Training samples")}>
                  {count(period.samples)}
                </Table.Td>
              </Table.Tr>
            ))}
          </Table.Tbody>
        </Table>
      </div>
      {periods.length > FEW && !showsAll && (
        <Button variant="default" size="xs" onClick={() => setShowsAll(true)}>
          {t("Show all {{number}}", { number: count(periods.length) })}
        </Button>
      )}
    </>
  );
}
