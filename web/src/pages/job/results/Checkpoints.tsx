import { Button, Text } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { api, body } from "../../../api/client";
import { fetchAgain } from "../../../api/fetchAgain";
import { artifacts, checkpoints } from "../../../api/queries";
import type { Checkpoint, Job } from "../../../api/types";
import { Failure, Waiting } from "../../../components/Feedback";
import { bytes, count, dateAndTime } from "../../../format";
import classes from "./Artifacts.module.css";

/** Checkpoints of the job. Each can be exported as an artifact before the job ends. */
export function Checkpoints({ job }: { job: Job }) {
  const { data, error, refetch } = useQuery(checkpoints(job.id));
  const made = useQuery(artifacts(job.id)).data?.map((one) => one.name) ?? [];
  if (data === undefined) return <Waiting error={error} refetch={refetch} lines={2} />;
  return (
    <ul className={classes.files}>
      {data.toReversed().map((one) => (
        <Entry key={one.step} job={job} checkpoint={one} isMade={made.includes(artifactName(one.step))} />
      ))}
    </ul>
  );
}

function Entry({ job, checkpoint, isMade }: { job: Job; checkpoint: Checkpoint; isMade: boolean }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const { step } = checkpoint;
  const exporting = useMutation({
    mutationFn: () => {
      const params = { path: { job_id: job.id, step } };
      return body(api.POST("/api/v1/jobs/{job_id}/checkpoints/{step}/export", { params }));
    },
    onSuccess: () => fetchAgain(client, { queryKey: artifacts(job.id).queryKey }),
  });
  return (
    <li className={classes.file}>
      <Text size="sm" className={classes.path}>
        {t("step {{step}}", { step: count(step) })}
        {job.checkpoint_step === step && ` · ${t("the job continues from here")}`}
      </Text>
      <Text size="sm" c="dimmed">
        {dateAndTime(checkpoint.saved_at)} · {bytes(checkpoint.size_bytes)}
      </Text>
      {isMade ? (
        <Text size="sm" c="dimmed">
          {t("exported as {{name}}", { name: artifactName(step) })}
        </Text>
      ) : (
        <Button
          size="compact-sm"
          variant="default"
          loading={exporting.isPending}
          onClick={() => exporting.mutate()}
          aria-label={t("Export the checkpoint of step {{step}}", { step: count(step) })}
        >
          {t("Export")}
        </Button>
      )}
      {exporting.error !== null && <Failure error={exporting.error} />}
    </li>
  );
}

/** The server's name of an exported checkpoint. */
function artifactName(step: number): string {
  return `step-${String(step).padStart(8, "0")}`;
}
