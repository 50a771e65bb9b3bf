import { Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Job } from "../../api/types";
import { count } from "../../format";
import { Facts } from "./Facts";
import classes from "./results/Artifacts.module.css";

/** A batch: its model, its requests, and its speed. */
export function Batch({ job }: { job: Job }) {
  const { t } = useTranslation();
  if (job.spec.kind === "train" || job.spec.kind === "sparse" || job.spec.kind === "sweep") return null;
  const { data, kind, output } = job.spec;
  const model = modelOf(job.spec);
  const column = "text" in data ? data.text : (data.prompt ?? data.messages);
  const format = output.format ?? data.files[0]?.split(".").at(-1);
  return (
    <>
      <Facts
        of={[
          [t("Rows with an error"), count(job.rows?.failed ?? 0)],
          [t("Answers as"), format ?? "–"],
        ]}
      />
      <Text size="sm">
        {kind === "generate"
          ? t("The column {{column}} of each row is answered by {{model}}.", { column, model })
          : t("The column {{column}} of each row is made into a vector by {{model}}.", { column, model })}
      </Text>
      <ul className={classes.files}>
        {data.files.map((file) => (
          <li key={file}>
            <Text size="sm" ff="monospace">
              {file}
            </Text>
          </li>
        ))}
      </ul>
    </>
  );
}

function modelOf({ deployment, model }: Exclude<Job["spec"], { kind: "train" | "sparse" | "sweep" }>): string {
  return deployment ?? model?.path ?? `${model?.job}/${model?.artifact}`;
}
