import { useTranslation } from "react-i18next";

import type { Job } from "../../api/types";
import { count } from "../../format";
import { Facts } from "./Facts";

type Spec = Extract<Job["spec"], { kind: "sparse" }>;

/** A sparse model: its kind, and how workers and servers share the work. */
export function Sparse({ spec }: { spec: Spec }) {
  const { t } = useTranslation();
  const { model, training } = spec;
  const threads = training.hogwild_threads;
  const isDual = model.name === "ridge" || model.name === "svm";
  const hasServers = !isDual && threads == null;
  return (
    <Facts
      of={[
        [t("Model"), model.name.replaceAll("_", " ")],
        [isDual ? t("Rounds") : t("Passes over the data"), count(training.passes)],
        threads == null ? [t("Parts of the data"), count(training.workers)] : [t("Threads without locks"), count(threads)],
        ...(hasServers ? ([[t("Ranges of weights"), count(training.servers)], [t("Staleness"), String(training.staleness)]] as const) : []),
      ]}
    />
  );
}
