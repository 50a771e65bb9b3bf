import { Table, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Plan } from "../api/types";
import { TextAlternative } from "../components/chart/TextAlternative";
import { sentence } from "../components/Feedback";
import { MachineLink } from "../components/MachineLink";
import { bytes, count } from "../format";
import { layerRange, ranges } from "./layout";

/** The picture as a table of all branches, with the planner's reasons. */
export function MemberTable({ plan }: { plan: Plan }) {
  const { t } = useTranslation();
  const hasBranches = plan.branches.length > 0;
  const parts = hasBranches ? plan.branches : [{ number: 0, stages: plan.stages }];
  return (
    <TextAlternative title={t("The same as a table, with the reason for each choice")}>
      <Table className="stacking" verticalSpacing="xs" horizontalSpacing="sm" mt="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Machine")}</Table.Th>
            {hasBranches && <Table.Th>{t("Branch")}</Table.Th>}
            <Table.Th>{t("Shard")}</Table.Th>
            <Table.Th>{t("Microbatches")}</Table.Th>
            <Table.Th className="numeric">{t("Memory")}</Table.Th>
            <Table.Th className="numeric">{t("Busy")}</Table.Th>
            <Table.Th>{t("Why")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {parts.flatMap(({ number, stages }) =>
            stages.flatMap((stage, index) =>
              stage.members.map((member) => (
                <Table.Tr key={`${number} ${member.contributor_id}`}>
                  <Table.Td data-label={t("Machine")}>
                    <MachineLink id={member.contributor_id} name={member.name} fw={600} />
                  </Table.Td>
                  {hasBranches && (
                    <Table.Td data-label={t("Branch")}>
                      <span>{number}</span>
                    </Table.Td>
                  )}
                  <Table.Td data-label={t("Shard")}>
                    <Text size="sm">
                      {t("stage {{stage}}", { stage: index + 1 })},{" "}
                      {stage.stop - stage.start === 1
                        ? t("layer {{range}}", { range: layerRange(stage) })
                        : t("layers {{range}}", { range: layerRange(stage) })}
                    </Text>
                  </Table.Td>
                  <Table.Td data-label={t("Microbatches")}>
                    <Text size="sm">
                      {ranges(member.microbatches) || "–"} ({count(member.microbatches.length)})
                    </Text>
                  </Table.Td>
                  <Table.Td className="numeric" data-label={t("Memory")}>
                    <Text size="sm">{bytes(member.memory_bytes)}</Text>
                  </Table.Td>
                  <Table.Td className="numeric" data-label={t("Busy")}>
                    <Text size="sm">{member.busy_fraction == null ? "–" : `${Math.round(100 * member.busy_fraction)}%`}</Text>
                  </Table.Td>
                  <Table.Td data-label={t("Why")}>
                    <Text size="xs" c="dimmed">
                      {sentence(member.reason)}
                    </Text>
                  </Table.Td>
                </Table.Tr>
              )),
            ),
          )}
        </Table.Tbody>
      </Table>
    </TextAlternative>
  );
}
