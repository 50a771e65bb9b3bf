import { Button, Group } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { job as jobQuery } from "../../api/queries";
import { useMay, useOwns } from "../../api/scopes";
import type { Job } from "../../api/types";
import { ConfirmButton } from "../../components/ConfirmButton";
import { ButtonLink } from "../../components/links";
import { Failure } from "../../components/Feedback";

/** Cancel, resume what ended too early, or submit the like. */
export function Actions({ job }: { job: Job }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const params = { path: { job_id: job.id } };
  const takeIn = (changed: Job) => client.setQueryData(jobQuery(job.id).queryKey, changed);
  const resume = useMutation({
    mutationFn: () => body(api.POST("/api/v1/jobs/{job_id}/resume", { params })),
    onSuccess: takeIn,
  });
  const isOurs = useOwns(job.owner);
  const maySubmit = useMay("submit");
  const isOpen = job.state === "queued" || job.state === "planning" || job.state === "running";
  const canResume = job.state === "failed" || job.state === "cancelled";
  return (
    <Group gap="sm">
      {resume.error !== null && <Failure error={resume.error} />}
      {canResume && isOurs && (
        <Button loading={resume.isPending} onClick={() => resume.mutate()}>
          {job.checkpoint_step === null ? t("Start again") : t("Resume from step {{step}}", { step: job.checkpoint_step })}
        </Button>
      )}
      {isOpen && isOurs && (
        <ConfirmButton
          action={t("Cancel job")}
          pending={job.cancel_requested_at === null ? undefined : t("Cancelling")}
          question={t("Cancel {{name}}?", { name: job.name })}
          onConfirm={async () => takeIn(await body(api.POST("/api/v1/jobs/{job_id}/cancel", { params })))}
        >
          {t("It stops after what it is at, and its machines are free again.")}{" "}
          {job.checkpoint_step === null
            ? t("It can be started again.")
            : t("It can be resumed from step {{step}}.", { step: job.checkpoint_step })}
        </ConfirmButton>
      )}
      {maySubmit && (
        <ButtonLink variant="default" to="/submit" search={{ from: job.id }}>
          {t("Clone")}
        </ButtonLink>
      )}
    </Group>
  );
}
