import { Table, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Deployment } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { AnchorLink } from "../../components/links";
import { StateBadge } from "../../components/StateBadge";
import { count } from "../../format";

/** Served models with their load: waiting requests and ready replicas. */
export function Deployments({ deployments }: { deployments: readonly Deployment[] }) {
  const { t } = useTranslation();
  if (deployments.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("No model is served.")}
      </Text>
    );
  }
  return (
    <div className="scroll">
      <Table className="stacking" verticalSpacing="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Deployment")}</Table.Th>
            <Table.Th>{t("State")}</Table.Th>
            <Table.Th className="numeric">{t("Replicas")}</Table.Th>
            <Table.Th className="numeric">{t("Requests that wait")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {deployments.map(({ id, name, state, reason, replicas }) => (
            <Table.Tr key={id}>
              <Table.Td data-label={t("Deployment")}>
                <AnchorLink to="/deployments/$name" params={{ name }} size="sm" fw={600}>
                  {name}
                </AnchorLink>
              </Table.Td>
              <Table.Td data-label={t("State")}>
                <StateBadge state={state} />
                <Text size="xs" c="dimmed">
                  {sentence(reason)}
                </Text>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Replicas")}>
                {replicas === null
                  ? "–"
                  : t("{{ready}} of {{wanted}}", { ready: count(replicas.ready), wanted: count(replicas.wanted) })}
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Requests that wait")}>
                {replicas === null ? "–" : count(replicas.waiting)}
              </Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}
