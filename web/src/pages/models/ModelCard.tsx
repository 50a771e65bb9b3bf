/** One model of the catalogue: its facts, whether it fits on the machines, and a button that deploys it. */
import { Button, Group, Loader, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useId } from "react";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { ApiProblem } from "../../api/problem";
import type { CatalogueEntry } from "../../api/types";
import { Failure, sentence } from "../../components/Feedback";
import { ButtonLink } from "../../components/links";
import { bytes, count, si } from "../../format";
import { translated } from "../../i18n/texts";
import type { Deploying } from "./deploying";
import { fitOf, isInfeasible, parameters, planRequest } from "./entries";
import classes from "./Models.module.css";

interface Props {
  entry: CatalogueEntry;
  /** Identifies the ready machines and their work. */
  machines: string;
  deployment: Deploying;
}

export function ModelCard({ entry, machines, deployment }: Props) {
  const { t } = useTranslation();
  const id = useId();
  const { facts } = entry;
  const isThis = deployment.entry?.id === entry.id;
  const canServe = entry.problem == null && !entry.is_pending;
  return (
    <article className={`card ${classes.model}`} aria-labelledby={id}>
      <header className={classes.head}>
        <Title order={3} size="h4" id={id} className={classes.name!}>
          {entry.name}
        </Title>
        <SourceLabel source={entry.source} />
      </header>
      {entry.description != null && <Text size="sm">{entry.description}</Text>}
      {facts != null ? (
        <dl className={classes.facts}>
          <Fact label={t("Parameters")} value={parameters(facts.parameters)} isLarge />
          <Fact label={t("Weights")} value={bytes(facts.weights_bytes)} isLarge />
          <Fact label={t("Longest sequence")} value={facts.window_tokens == null ? "–" : t("{{tokens}} tokens", { tokens: count(facts.window_tokens) })} />
          <Fact
            label={t("Route")}
            value={facts.kind === "embed" ? t("embeddings") : facts.has_chat_template ? t("chat") : t("completions, no chat template")}
          />
          <Fact label={t("Architecture")} value={facts.architecture} />
          <Fact label={t("Licence")} value={entry.licence ?? t("not stated")} />
        </dl>
      ) : entry.problem != null ? (
        <div className={classes.problem}>
          <Text size="sm" fw={600}>
            {t("It cannot be served: {{why}}", { why: sentence(entry.problem) })}
          </Text>
          {entry.hint != null && (
            <Text size="sm" c="dimmed">
              {sentence(entry.hint)}
            </Text>
          )}
        </div>
      ) : (
        <Text size="sm" c="dimmed">
          {entry.is_pending ? t("Its files are being read.") : t("It is fetched from the Hub when it is deployed for the first time.")}
        </Text>
      )}
      {isThis && deployment.error !== null && <Failure error={deployment.error} />}
      {isThis && deployment.failureReason !== null && deployment.isPending && (
        <Text size="sm" c="dimmed" role="status">
          {sentence(deployment.failureReason.message)}
        </Text>
      )}
      {canServe && (
        <footer className={classes.foot}>
          {facts?.kind === "embed" ? <span /> : <Fit entry={entry} machines={machines} />}
          <Group gap="xs" wrap="nowrap">
            {(entry.model.path != null || entry.model.job != null) && (
              <ButtonLink
                to="/models"
                search={{
                  new: true,
                  ...(entry.model.job != null ? { job: entry.model.job, artifact: entry.model.artifact ?? "model" } : { path: entry.model.path! }),
                }}
                variant="default"
                size="xs"
                aria-label={t("Options for {{name}}", { name: entry.name })}
              >
                {t("Options")}
              </ButtonLink>
            )}
            <Button
              size="xs"
              loading={isThis && deployment.isPending}
              disabled={!isThis && deployment.isPending}
              onClick={() => deployment.start(entry)}
              aria-label={t("Deploy {{name}}", { name: entry.name })}
            >
              {t("Deploy")}
            </Button>
          </Group>
        </footer>
      )}
    </article>
  );
}

function SourceLabel({ source }: { source: CatalogueEntry["source"] }) {
  const words = useSourceWords();
  return (
    <Text size="xs" c="dimmed" className={classes.source!}>
      {words[source]}
    </Text>
  );
}

export function useSourceWords(): Record<CatalogueEntry["source"], string> {
  const { t } = useTranslation();
  return {
    operator: t("recommended"),
    job: t("trained here"),
    upload: t("upload"),
    hub: t("Hugging Face Hub"),
    folder: t("folder on the server"),
  };
}

function Fact({ label, value, isLarge = false }: { label: string; value: string; isLarge?: boolean }) {
  return (
    <div className={classes.fact} data-large={isLarge}>
      <dt>{label}</dt>
      <dd>{value}</dd>
    </div>
  );
}

/** Whether the ready machines can serve the model, and at which speed; computed on request of the user. */
function Fit({ entry, machines }: { entry: CatalogueEntry; machines: string }) {
  const { t } = useTranslation();
  const { data, error, isFetching, refetch } = useQuery({
    queryKey: ["fit", entry.id, machines],
    queryFn: ({ signal }) => body(api.POST("/api/v1/plans", { signal, body: planRequest(entry) as never })),
    enabled: false,
    retry: false,
  });
  const fit = data === undefined ? null : fitOf(data);
  if (isFetching) {
    return (
      <Group gap="xs" role="status">
        <Loader size={14} aria-hidden />
        <Text size="xs" c="dimmed">
          {t("The planner places it on the machines.")}
        </Text>
      </Group>
    );
  }
  if (error !== null) {
    return (
      <Text size="xs" className={classes.not!} role="status" title={error instanceof ApiProblem && error.hint !== undefined ? translated(error.hint) : undefined}>
        {isInfeasible(error) ? t("Does not fit here: {{why}}", { why: sentence(error.message) }) : sentence(error.message)}
      </Text>
    );
  }
  if (fit !== null) {
    return (
      <Text size="xs" className={classes.fits!} role="status">
        {t("Fits here on {{count}} machines, about {{speed}}", { count: fit.machines, speed: si(Number(fit.tokensPerS.toPrecision(2)), "tokens/s") })}
      </Text>
    );
  }
  if (data !== undefined) {
    return (
      <Text size="xs" c="dimmed" role="status">
        {t("The planner cannot say whether it fits.")}
      </Text>
    );
  }
  return (
    <Button size="xs" variant="subtle" className={classes.ask!} onClick={() => void refetch()} aria-label={t("Does it fit here? {{name}}", { name: entry.name })}>
      {t("Does it fit here?")}
    </Button>
  );
}
