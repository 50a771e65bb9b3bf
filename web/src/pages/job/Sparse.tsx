import { SimpleGrid } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Job } from "../../api/types";
import { Figure } from "../../components/Figure";
import { count } from "../../format";

type Spec = Extract<Job["spec"], { kind: "sparse" }>;

/** A sparse model: its kind, and how workers and servers share the work. */
export function Sparse({ spec }: { spec: Spec }) {
  const { t } = useTranslation();
  const { model, training } = spec;
  const threads = training.hogwild_threads;
  const isDual = model.name === "ridge" || model.name === "svm";
  const hasServers = !isDual && threads == null;
  return (
    <SimpleGrid cols={{ base: 2, sm: 4 }} spacing="sm">
      <Figure label={t("Model")} value={model.name.replaceAll("_", " ")} />
      <Figure label={isDual ? t("Rounds") : t("Passes over the data")} value={count(training.passes)} />
      {threads == null ? (
        <Figure label={t("Parts of the data")} value={count(training.workers)} />
      ) : (
        <Figure label={t("Threads without locks")} value={count(threads)} />
      )}
      {hasServers && <Figure label={t("Ranges of weights")} value={count(training.servers)} />}
      {hasServers && <Figure label={t("Staleness")} value={String(training.staleness)} />}
    </SimpleGrid>
  );
}
