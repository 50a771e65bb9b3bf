import { Button, Group } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { fetchAgain } from "../../api/fetchAgain";
import { job as jobQuery } from "../../api/queries";
import { useMay, useOwns } from "../../api/scopes";
import type { Job } from "../../api/types";
import { ConfirmButton } from "../../components/ConfirmButton";
import { ButtonLink } from "../../components/links";
import { Failure } from "../../components/Feedback";

/** Cancel a job, resume one that ended too early, copy one, or delete one that has ended. */
export function Actions({ job }: { job: Job }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const navigate = useNavigate();
  const params = { path: { job_id: job.id } };
  const takeIn = (changed: Job) => client.setQueryData(jobQuery(job.id).queryKey, changed);
  const resume = useMutation({
    mutationFn: () => body(api.POST("/api/v1/jobs/{job_id}/resume", { params })),
    onSuccess: takeIn,
  });
  const isOurs = useOwns(job.owner);
  const maySubmit = useMay("submit");
  const isOpen = job.state === "queued" || job.state === "planning" || job.state === "running";
  const remove = async () => {
    await body(api.DELETE("/api/v1/jobs/{job_id}", { params }));
    // Leave this page first, because it would refetch the deleted job.
    await navigate({ to: "/jobs" });
    client.removeQueries({ queryKey: jobQuery(job.id).queryKey });
    await fetchAgain(client, { queryKey: ["jobs"] });
  };
  const canResume = job.state === "failed" || job.state === "cancelled";
  return (
    <Group gap="sm">
      {resume.error !== null && <Failure error={resume.error} />}
      {canResume && isOurs && (
        <Button variant={job.state === "failed" ? "default" : "filled"} loading={resume.isPending} onClick={() => resume.mutate()}>
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
          {t("It finishes its current work, then stops, and its machines are free again.")}{" "}
          {job.checkpoint_step === null
            ? t("It can be started again.")
            : t("It can be resumed from step {{step}}.", { step: job.checkpoint_step })}
        </ConfirmButton>
      )}
      {maySubmit && job.state !== "failed" && (
        <ButtonLink variant="default" to="/submit" search={{ from: job.id }}>
          {t("Clone")}
        </ButtonLink>
      )}
      {!isOpen && isOurs && (
        <ConfirmButton action={t("Delete job")} question={t("Delete {{name}}?", { name: job.name })} onConfirm={remove}>
          {t("Its events, metrics, checkpoints and artifacts are deleted, too. Uploads are kept.")}
        </ConfirmButton>
      )}
    </Group>
  );
}
