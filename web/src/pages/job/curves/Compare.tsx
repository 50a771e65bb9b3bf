import { Button, NativeSelect } from "@mantine/core";
import { useInfiniteQuery } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { jobs } from "../../../api/queries";
import type { Job } from "../../../api/types";
import { dateAndTime } from "../../../format";
import classes from "./Curves.module.css";

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
        maw={200}
        aria-label={t("Compare with")}
        value=""
        disabled={free.length === 0 || others.length >= most}
        onChange={(event) => event.currentTarget.value !== "" && onChange([...others, event.currentTarget.value])}
        data={[
          { value: "", label: free.length === 0 ? t("no other job") : t("compare with …") },
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
