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

export function Spells({ machineId }: { machineId: string }) {
  const { t } = useTranslation();
  const { data: work, error, refetch } = useQuery(machineWork(machineId));
  const [showsAll, setShowsAll] = useState(false);
  if (work === undefined) return <Waiting error={error} refetch={refetch} lines={2} />;
  // The machines of a job hold nothing while the job is planned.
  const spells = work.spells.filter((spell) => spell.num_layers !== null);
  if (spells.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("It has not worked for a job or a deployment yet.")}
      </Text>
    );
  }
  const shown = showsAll ? spells : spells.slice(0, FEW);
  return (
    <>
      <Text size="sm">
        {t("{{steps}} steps, {{microbatches}} microbatches, {{tokens}} tokens or samples, in {{time}} at work", {
          steps: count(work.steps),
          microbatches: count(work.microbatches),
          tokens: count(work.tokens),
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
              <Table.Th className="numeric">{t("Tokens")}</Table.Th>
            </Table.Tr>
          </Table.Thead>
          <Table.Tbody>
            {shown.map((spell) => (
              <Table.Tr key={spell.began_at + (spell.job_id ?? spell.deployment_id)}>
                <Table.Td data-label={t("Work")}>
                  <Holder held={spell} />
                </Table.Td>
                <Table.Td data-label={t("Part")}>
                  <Text size="sm">{partWords(t, spell) ?? "–"}</Text>
                </Table.Td>
                <Table.Td data-label={t("From")}>
                  <Text size="sm">{dateAndTime(spell.began_at)}</Text>
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Time")}>
                  {duration(spell.seconds)}
                  {spell.ended_at === null && ` ${t("so far")}`}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Steps")}>
                  {count(spell.steps)}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Microbatches")}>
                  {count(spell.steps * (spell.microbatches ?? 0))}
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Tokens")}>
                  {count(spell.tokens)}
                </Table.Td>
              </Table.Tr>
            ))}
          </Table.Tbody>
        </Table>
      </div>
      {spells.length > FEW && !showsAll && (
        <Button variant="default" size="xs" onClick={() => setShowsAll(true)}>
          {t("Show all {{number}}", { number: count(spells.length) })}
        </Button>
      )}
    </>
  );
}
