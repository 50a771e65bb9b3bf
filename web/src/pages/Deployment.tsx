/** One deployment: its state, its performance, its machines, and how to call it. */
import { Alert, SimpleGrid, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { deployment as deploymentQuery, deploymentStatus, figures as figuresQuery } from "../api/queries";
import type { Deployment as DeploymentData, Figures, ReplicaStatus } from "../api/types";
import { sentence, Waiting } from "../components/Feedback";
import { Figure } from "../components/Figure";
import { Page, Section } from "../components/frame/Page";
import { StateBadge } from "../components/StateBadge";
import { ago, count, dateAndTime, si } from "../format";
import { Placement } from "../placement/Placement";
import { useNow } from "../useNow";
import { Actions } from "./deployment/Actions";
import { isOver, modelOf, replicasOf, sumOf } from "./deployment/facts";
import { Log } from "./deployment/Log";
import { Replica } from "./deployment/Replica";
import { Snippets } from "./deployment/Snippets";

const route = getRouteApi("/deployments/$name");

export function Deployment() {
  const { name } = route.useParams();
  const { data, error, refetch } = useQuery(deploymentQuery(name));
  if (data === undefined) {
    return (
      <Page title={name}>
        <Waiting error={error} refetch={refetch} />
      </Page>
    );
  }
  return <Known deployment={data} />;
}

function Known({ deployment }: { deployment: DeploymentData }) {
  const { t } = useTranslation();
  const hasEnded = isOver(deployment);
  const status = useStatus(deployment);
  const replicas = status?.replicas;
  const running = sumOf(replicas, (one) => one.queue.running);
  const queued = sumOf(replicas, (one) => one.queue.queued, status?.waiting);
  const speed = sumOf(replicas, (one) => one.tokens_per_s);
  const window = replicas?.find((one) => one.window_tokens != null)?.window_tokens;
  return (
    <Page
      title={deployment.name}
      beside={<StateBadge state={deployment.state} />}
      actions={!hasEnded && <Actions deployment={deployment} />}
    >
      <Standing deployment={deployment} />
      {deployment.computation != null && (
        <Text size="sm" c="dimmed">
          {sentence(deployment.computation.sentence)}
        </Text>
      )}
      <SimpleGrid cols={{ base: 2, sm: 4 }} spacing="sm">
        <Figure
          label={t("Replicas that answer")}
          value={replicasOf(deployment)}
          {...(deployment.replicas !== null && { title: sentence(deployment.replicas.reason) })}
        />
        <Figure label={t("Speed")} value={speed === null ? "–" : si(Math.round(speed * 10) / 10, "tokens/s")} />
        <Figure
          label={t("Requests")}
          value={running === null ? "–" : t("{{running}} running, {{queued}} queued", { running, queued })}
        />
        <Figure
          label={t("Longest sequence")}
          value={window == null ? "–" : t("{{tokens}} tokens", { tokens: count(window) })}
        />
      </SimpleGrid>
      {!hasEnded && (
        <Section
          title={t("Measured beside predicted")}
          actions={status !== undefined && replicas!.length > 0 && <Age at={status.at} />}
        >
          {replicas === undefined || replicas.length === 0 ? (
            <Text size="sm" c="dimmed">
              {t("No replica has reported its status yet.")}
            </Text>
          ) : (
            <Stack gap="lg">
              {replicas.map((one, index) => (
                <Replica key={index} status={one} {...(replicas.length > 1 && { number: index + 1 })} />
              ))}
            </Stack>
          )}
        </Section>
      )}
      <Section title={t("Placement")}>
        {deployment.plans.length === 0 ? (
          <Text size="sm" c="dimmed">
            {hasEnded ? t("It has no machines any more.") : t("Nothing is placed yet.")}
          </Text>
        ) : (
          deployment.plans.map((plan, index) => (
            <div key={index}>
              {deployment.plans.length > 1 && (
                <Text fw={600} size="sm" mb="xs">
                  {t("Replica {{number}}", { number: index + 1 })}
                </Text>
              )}
              <Placement plan={plan} />
            </div>
          ))
        )}
      </Section>
      {!hasEnded && (
        <Section title={t("Use it")}>
          <Snippets name={deployment.name} />
        </Section>
      )}
      <Section title={t("Events")}>
        <Log deploymentId={deployment.id} />
      </Section>
      <Text size="sm" c="dimmed">
        {deployment.id} · {modelOf(deployment.spec).full} · {deployment.spec.dtype} · {deployment.spec.objective} ·{" "}
        {t("created {{when}}", { when: dateAndTime(deployment.created_at) })}
      </Text>
    </Page>
  );
}

/** The reason for the current state; for a failure also the hint. */
function Standing({ deployment }: { deployment: DeploymentData }) {
  const { state, reason, error } = deployment;
  if (state !== "failed") return <Text size="sm">{sentence(reason)}</Text>;
  const hint = typeof error?.hint === "string" ? error.hint : undefined;
  return (
    <Alert className="failure" title={sentence(reason)}>
      {hint !== undefined && sentence(hint)}
    </Alert>
  );
}

function Age({ at }: { at: string }) {
  const { t } = useTranslation();
  const now = useNow();
  return (
    <Text size="sm" c="dimmed">
      {t("as of {{when}}", { when: ago(at, now) })}
    </Text>
  );
}

interface Status {
  replicas: ReplicaStatus[];
  waiting: number;
  at: string;
}

/** The last figures from the stream, combined with the plan's predictions, which the stream leaves out. */
function useStatus(deployment: DeploymentData): Status | undefined {
  const hasEnded = isOver(deployment);
  const { data: polled } = useQuery({ ...deploymentStatus(deployment.name), enabled: !hasEnded });
  const { data: all } = useQuery(figuresQuery);
  if (hasEnded) return undefined;
  const live: Figures | undefined = all?.[deployment.name];
  if (live !== undefined && (polled === undefined || live.at >= polled.at)) {
    const replicas = live.status.replicas.map((one, index) => ({
      ...one,
      prediction: polled?.replicas[index]?.prediction ?? null,
    }));
    return { replicas, waiting: live.replicas.waiting, at: live.at };
  }
  return polled && { replicas: polled.replicas, waiting: deployment.replicas?.waiting ?? 0, at: polled.at };
}
