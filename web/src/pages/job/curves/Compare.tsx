import { Button, NativeSelect } from "@mantine/core";
import { useInfiniteQuery } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { jobs } from "../../../api/queries";
import type { Job } from "../../../api/types";
import { dateAndTime, t } from "../../../format";
import { taskOf, type FIGURES, type FigureName } from "../search";
import classes from "./Curves.module.css";

/** Keys of `t`. */
const NAME_OF_FIGURE: Record<(typeof FIGURES)[number], string> = {
  loss: "Loss",
  learning_rate: "Learning rate",
  tokens_per_s: "Speed",
  seconds: "Step time",
  gradient_norm: "Gradient norm",
  accuracy: "Accuracy",
  top_5_accuracy: "Top-5 accuracy",
  f1: "F1",
  auroc: "AUROC",
  rmse: "RMSE",
  mae: "Mean absolute error",
  r2: "R²",
  perplexity: "Perplexity",
};

/** The name of a figure, with that of its task before it. */
export function nameOfFigure(figure: FigureName): string {
  const { figure: name, task } = taskOf(figure);
  return task === undefined ? t(NAME_OF_FIGURE[name]) : t("{{task}}: {{figure}}", { task, figure: t(NAME_OF_FIGURE[name]) });
}

interface Props {
  job: Job;
  /** Ids of the other jobs that are drawn. */
  others: readonly string[];
  most: number;
  onChange: (ids: string[]) => void;
}

/** Chooses other training jobs to draw beside this one. */
export function Compare({ job, others, most, onChange }: Props) {
  const { t } = useTranslation();
  const { data } = useInfiniteQuery(jobs({ kind: "train", trials: true }));
  const known = data?.pages.flatMap((page) => page.jobs) ?? [];
  const free = known.filter((one) => one.id !== job.id && !others.includes(one.id) && one.step > 0);
  const nameOf = (id: string) => known.find((one) => one.id === id)?.name ?? id;
  return (
    <>
      <NativeSelect
        size="xs"
        maw={220}
        label={t("Compare with")}
        value=""
        disabled={free.length === 0 || others.length >= most}
        onChange={(event) => event.currentTarget.value !== "" && onChange([...others, event.currentTarget.value])}
        data={[
          { value: "", label: free.length === 0 ? t("no other job") : t("another job …") },
          ...free.map((one) => ({ value: one.id, label: `${one.name} · ${dateAndTime(one.created_at)}` })),
        ]}
      />
      {others.length > 0 && (
        <ul className={classes.chips} aria-label={t("Compared with")}>
          {others.map((id) => (
            <li key={id}>
              <Button
                size="compact-sm"
                variant="default"
                onClick={() => onChange(others.filter((other) => other !== id))}
                aria-label={t("Without {{name}}", { name: `${nameOf(id)} ${id.slice(-4)}` })}
                rightSection="×"
              >
                {nameOf(id)} {id.slice(-4)}
              </Button>
            </li>
          ))}
        </ul>
      )}
    </>
  );
}
