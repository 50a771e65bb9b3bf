/** Deployments that are up, or that have ended. */
import { Button, Group, Table, Text, Title } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { getRouteApi, Link } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { deployments, figures as figuresQuery } from "../../api/queries";
import type { Deployment, Figures } from "../../api/types";
import { sentence, Waiting } from "../../components/Feedback";
import { AnchorLink } from "../../components/links";
import { StateBadge } from "../../components/StateBadge";
import { ago, si } from "../../format";
import { translated } from "../../i18n/texts";
import { useNow } from "../../useNow";
import { isOver, modelOf, replicasOf, sumOf } from "../deployment/facts";
import facts from "../deployment/Deployments.module.css";
import classes from "../Jobs.module.css";

const route = getRouteApi("/models");

export function Running() {
  const { t } = useTranslation();
  const search = route.useSearch();
  const which = search.show ?? "up";
  const query = useInfiniteQuery(deployments(which));
  const all = query.data?.pages.flatMap((page) => page.deployments);
  return (
    <>
      <Group justify="space-between" gap="sm">
        <Title order={2}>{t("Served models")}</Title>
        <nav className={classes.filter} aria-label={t("Deployments by state")}>
          {(["up", "over"] as const).map((one) => (
            <Link
              key={one}
              to="/models"
              search={({ show: _, ...rest }) => (one === "up" ? rest : { ...rest, show: one })}
              className={classes.choice}
              data-chosen={one === which}
              aria-current={one === which ? "page" : undefined}
            >
              {one === "up" ? t("up") : t("over")}
            </Link>
          ))}
        </nav>
      </Group>
      {all === undefined ? (
        <Waiting error={query.error} refetch={query.refetch} lines={2} />
      ) : all.length === 0 ? (
        <Text size="sm" c="dimmed">
          {which === "up" ? t("No model is served. Any model below answers clients of the OpenAI API when it is deployed.") : t("No deployment is over.")}
        </Text>
      ) : (
        <DeploymentTable all={all} />
      )}
      {query.hasNextPage && (
        <Group>
          <Button variant="default" loading={query.isFetchingNextPage} onClick={() => void query.fetchNextPage()}>
            {t("Show older deployments")}
          </Button>
        </Group>
      )}
    </>
  );
}

function DeploymentTable({ all }: { all: readonly Deployment[] }) {
  const { t } = useTranslation();
  const now = useNow();
  const { data: figures } = useQuery(figuresQuery);
  return (
    <div className="card scroll">
      <Table className="stacking" verticalSpacing="sm" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Name")}</Table.Th>
            <Table.Th>{t("State")}</Table.Th>
            <Table.Th>{t("Model")}</Table.Th>
            <Table.Th className="numeric">{t("Replicas")}</Table.Th>
            <Table.Th className="numeric">{t("Requests")}</Table.Th>
            <Table.Th className="numeric">{t("Speed")}</Table.Th>
            <Table.Th className="numeric">{t("Created")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {all.map((one) => (
            <Row key={one.id} deployment={one} now={now} figures={isOver(one) ? undefined : figures?.[one.name]} />
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

interface RowProps {
  deployment: Deployment;
  figures: Figures | undefined;
  now: number;
}

function Row({ deployment, figures, now }: RowProps) {
  const { t } = useTranslation();
  const replicas = figures?.status.replicas;
  const running = sumOf(replicas, (one) => one.queue.running);
  const queued = sumOf(replicas, (one) => one.queue.queued, figures?.replicas.waiting);
  const speed = sumOf(replicas, (one) => one.tokens_per_s);
  return (
    <Table.Tr>
      <Table.Td data-label={t("Name")}>
        <AnchorLink
          to="/deployments/$name"
          // Another deployment may have the name by now.
          params={{ name: isOver(deployment) ? deployment.id : deployment.name }}
          size="sm"
          fw={600}
        >
          {deployment.name}
        </AnchorLink>
        <Text size="xs" c="dimmed">
          {deployment.id}
        </Text>
      </Table.Td>
      <Table.Td data-label={t("State")}>
        <StateBadge state={deployment.state} />
        {deployment.state !== "ready" && (
          <Text size="xs" c="dimmed" mt={2} maw={280} lineClamp={2} title={translated(deployment.reason)}>
            {sentence(deployment.reason)}
          </Text>
        )}
      </Table.Td>
      <Table.Td data-label={t("Model")} title={modelOf(deployment.spec).full}>
        <Text size="sm" maw={220} className={facts.model!}>
          {modelOf(deployment.spec).short}
        </Text>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Replicas")}>{replicasOf(deployment)}</Table.Td>
      <Table.Td className="numeric" data-label={t("Requests")}>
        {running === null ? "–" : t("{{running}} running, {{queued}} queued", { running, queued })}
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Speed")}>{speed === null ? "–" : si(Math.round(speed * 10) / 10, "tokens/s")}</Table.Td>
      <Table.Td className="numeric" data-label={t("Created")}>{ago(deployment.created_at, now)}</Table.Td>
    </Table.Tr>
  );
}
