/** The models that can be served here, with a search and a filter by source. */
import { Group, Stack, Text, TextInput, Title } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { getRouteApi, Link } from "@tanstack/react-router";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import { catalogue, cluster, deployments } from "../../api/queries";
import type { ClusterView } from "../../api/types";
import { Empty, sentence, Waiting } from "../../components/Feedback";
import { CopyLine } from "../../components/copy/CopyLine";
import { ButtonLink } from "../../components/links";
import choices from "../Jobs.module.css";
import { useDeploying } from "./deploying";
import { found, machinesKey } from "./entries";
import { ModelCard, useSourceWords } from "./ModelCard";
import classes from "./Models.module.css";
import { SOURCES } from "./search";

const route = getRouteApi("/models");
const keyOfCluster = ({ machines }: ClusterView) => machinesKey(machines);

export function Catalogue() {
  const { t } = useTranslation();
  const { source } = route.useSearch();
  const [text, setText] = useState("");
  const { data, error, refetch } = useQuery(catalogue);
  const taken = useInfiniteQuery(deployments("up")).data?.pages.flatMap((page) => page.deployments.map((one) => one.name)) ?? [];
  const deploying = useDeploying(taken);
  const machines = useQuery({ ...cluster, select: keyOfCluster }).data ?? "";
  const words = useSourceWords();
  if (data === undefined) return <Waiting error={error} refetch={refetch} />;
  if (data.models.length === 0) {
    return (
      <>
        <Empty title={t("No model is here yet")}>
          <Text>{t("Train one, or send a Hugging Face folder with config.json, safetensors and a tokenizer:")}</Text>
          <CopyLine text="share-compute upload FOLDER" label={t("Command that sends a model")} />
          <ButtonLink to="/submit" search={{ start: "language" }} variant="default">
            {t("Train a model")}
          </ButtonLink>
        </Empty>
        <Notes notes={data.notes} />
      </>
    );
  }
  const shown = found(data.models, text, source);
  const sources = SOURCES.filter((one) => data.models.some((model) => model.source === one));
  return (
    <>
      <Group justify="space-between" gap="sm">
        <Title order={2}>{t("Ready to deploy")}</Title>
        <Group gap="xs" className={classes.tools!}>
          {sources.length > 1 && (
            <nav className={choices.filter} aria-label={t("Models by source")}>
              {[undefined, ...sources].map((one) => (
                <Link
                  key={one ?? "all"}
                  to="/models"
                  search={({ source: _, ...rest }) => (one === undefined ? rest : { ...rest, source: one })}
                  className={choices.choice}
                  data-chosen={one === source}
                  aria-current={one === source ? "page" : undefined}
                >
                  {one === undefined ? t("all") : words[one]}
                </Link>
              ))}
            </nav>
          )}
          <TextInput
            size="xs"
            type="search"
            aria-label={t("Search models")}
            placeholder={t("Search models")}
            value={text}
            onChange={(event) => setText(event.currentTarget.value)}
          />
        </Group>
      </Group>
      {shown.length === 0 ? (
        <Text size="sm" c="dimmed" role="status">
          {t("No model matches.")}
        </Text>
      ) : (
        <div className={classes.models}>
          {shown.map((entry) => (
            <ModelCard key={entry.id} entry={entry} machines={machines} deployment={deploying} />
          ))}
        </div>
      )}
      <Notes notes={data.notes} />
    </>
  );
}

function Notes({ notes }: { notes: readonly string[] }) {
  return (
    <Stack gap={2}>
      {notes.map((note) => (
        <Text key={note} size="xs" c="dimmed">
          {sentence(note)}
        </Text>
      ))}
    </Stack>
  );
}
