/** Served models, and a form for a new deployment. */
import { Button, Table, Text } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { getRouteApi, Link } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { deployments, figures as figuresQuery } from "../api/queries";
import type { Deployment, Figures } from "../api/types";
import { Empty, Failure, Loading, sentence } from "../components/Feedback";
import { AnchorLink, ButtonLink } from "../components/links";
import { Page } from "../components/frame/Page";
import { StateBadge } from "../components/StateBadge";
import { ago, si } from "../format";
import { useNow } from "../useNow";
import { DeployForm } from "./deployment/DeployForm";
import { isOver, modelOf, replicasOf, sumOf } from "./deployment/facts";
import facts from "./deployment/Deployments.module.css";
import classes from "./Jobs.module.css";

const route = getRouteApi("/deployments");

export function Deployments() {
  const { t } = useTranslation();
  const search = route.useSearch();
  const which = search.show ?? "up";
  const query = useInfiniteQuery(deployments(which));
  const all = query.data?.pages.flatMap((page) => page.deployments);
  return (
    <Page
      title={t("Deployments")}
      actions={
        search.new !== true && (
          <ButtonLink to="/deployments" search={{ ...search, new: true }}>
            {t("Deploy a model")}
          </ButtonLink>
        )
      }
    >
      {search.new === true && <DeployForm {...(search.job !== undefined && { job: search.job })} {...(search.path !== undefined && { path: search.path })} />}
      <nav className={classes.filter} aria-label={t("Deployments by state")}>
        {(["up", "over"] as const).map((one) => (
          <Link
            key={one}
            to="/deployments"
            search={one === "up" ? {} : { show: one }}
            className={classes.choice}
            data-chosen={one === which}
            aria-current={one === which ? "page" : undefined}
          >
            {one === "up" ? t("up") : t("over")}
          </Link>
        ))}
      </nav>
      {all === undefined ? (
        query.error === null ? (
          <Loading />
        ) : (
          <Failure error={query.error} retry={() => void query.refetch()} />
        )
      ) : all.length === 0 ? (
        <Empty title={which === "up" ? t("No model is served") : t("No deployment is over")}>
          <Text>{t("A deployment serves a model from the machines that joined, to any client of the OpenAI API.")}</Text>
          {which === "up" && search.new !== true && (
            <ButtonLink to="/deployments" search={{ new: true }}>
              {t("Deploy a model")}
            </ButtonLink>
          )}
        </Empty>
      ) : (
        <DeploymentTable all={all} />
      )}
      {query.hasNextPage && (
        <Button variant="default" loading={query.isFetchingNextPage} onClick={() => void query.fetchNextPage()}>
          {t("Show older deployments")}
        </Button>
      )}
    </Page>
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
          <Text size="xs" c="dimmed" mt={2} maw={280} lineClamp={2} title={deployment.reason}>
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
