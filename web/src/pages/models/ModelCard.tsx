/** One model of the catalogue: its facts, whether it fits on the machines, and a button that deploys it. */
import { Button, Group, Loader, Text, Title } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useId } from "react";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { ApiProblem } from "../../api/problem";
import { deployment as deploymentQuery } from "../../api/queries";
import { deploy } from "../../api/submit";
import type { CatalogueEntry } from "../../api/types";
import { Failure, sentence } from "../../components/Feedback";
import { ButtonLink } from "../../components/links";
import { bytes, count, si } from "../../format";
import { fitOf, freeName, parameters, planRequest } from "./entries";
import classes from "./Models.module.css";

const FETCH_MS = 3000;

interface Props {
  entry: CatalogueEntry;
  /** Names of the deployments that are up. */
  taken: readonly string[];
}

export function ModelCard({ entry, taken }: Props) {
  const { t } = useTranslation();
  const navigate = useNavigate();
  const client = useQueryClient();
  const id = useId();
  const { facts } = entry;
  const sending = useMutation({
    mutationFn: () => deploy({ name: freeName(entry.name, taken), model: entry.model }),
    // The server fetches a model of the Hub in the background, and accepts the request when it has arrived.
    retry: (_, failure) => failure instanceof ApiProblem && failure.code === "fetch-under-way",
    retryDelay: FETCH_MS,
    onSuccess: (made) => {
      client.setQueryData(deploymentQuery(made.name).queryKey, made);
      return navigate({ to: "/deployments/$name", params: { name: made.name } });
    },
  });
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
      {sending.error !== null && <Failure error={sending.error} />}
      {sending.failureReason !== null && sending.isPending && (
        <Text size="sm" c="dimmed" role="status">
          {sentence(sending.failureReason.message)}
        </Text>
      )}
      {canServe && (
        <footer className={classes.foot}>
          {facts?.kind === "embed" ? <span /> : <Fit entry={entry} />}
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
            <Button size="xs" loading={sending.isPending} onClick={() => sending.mutate()} aria-label={t("Deploy {{name}}", { name: entry.name })}>
              {t("Deploy")}
            </Button>
          </Group>
        </footer>
      )}
    </article>
  );
}

export function SourceLabel({ source }: { source: CatalogueEntry["source"] }) {
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
      <dd title={value}>{value}</dd>
    </div>
  );
}

/** Whether the ready machines can serve the model, and how fast; planned when the user asks. */
function Fit({ entry }: { entry: CatalogueEntry }) {
  const { t } = useTranslation();
  const { data, error, isFetching, refetch } = useQuery({
    queryKey: ["fit", entry.id],
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
      <Text size="xs" className={classes.not!} role="status" title={error instanceof ApiProblem ? error.hint : undefined}>
        {t("Does not fit here: {{why}}", { why: sentence(error.message) })}
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
  return (
    <Button size="xs" variant="subtle" className={classes.ask!} onClick={() => void refetch()} aria-label={t("Does it fit here? {{name}}", { name: entry.name })}>
      {t("Does it fit here?")}
    </Button>
  );
}
