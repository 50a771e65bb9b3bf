import { Button, Group, Modal, Stack, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { job as jobQuery } from "../../api/queries";
import type { Job } from "../../api/types";
import { ButtonLink } from "../../components/links";
import { Failure } from "../../components/Feedback";

/** Cancel, resume what ended too early, or submit the like. */
export function Actions({ job }: { job: Job }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const [asks, question] = useDisclosure(false);
  const params = { path: { job_id: job.id } };
  const onSuccess = (changed: Job) => client.setQueryData(jobQuery(job.id).queryKey, changed);
  const cancel = useMutation({
    mutationFn: () => body(api.POST("/api/v1/jobs/{job_id}/cancel", { params })),
    onSuccess: (changed) => {
      question.close();
      onSuccess(changed);
    },
  });
  const resume = useMutation({
    mutationFn: () => body(api.POST("/api/v1/jobs/{job_id}/resume", { params })),
    onSuccess,
  });
  const isOpen = job.state === "queued" || job.state === "planning" || job.state === "running";
  const canResume = job.state === "failed" || job.state === "cancelled";
  return (
    <Group gap="sm">
      {resume.error !== null && <Failure error={resume.error} />}
      {canResume && (
        <Button loading={resume.isPending} onClick={() => resume.mutate()}>
          {job.checkpoint_step === null ? t("Start again") : t("Resume from step {{step}}", { step: job.checkpoint_step })}
        </Button>
      )}
      {isOpen && (
        <Button variant="default" onClick={question.open} disabled={job.cancel_requested_at !== null}>
          {job.cancel_requested_at === null ? t("Cancel job") : t("Cancelling")}
        </Button>
      )}
      <ButtonLink variant="default" to="/submit" search={{ from: job.id }}>
        {t("Clone")}
      </ButtonLink>
      <Modal opened={asks} onClose={question.close} title={t("Cancel {{name}}?", { name: job.name })} centered>
        <Stack>
          <Text size="sm">
            {t("It stops after what it is at, and its machines are free again.")}{" "}
            {job.checkpoint_step === null
              ? t("It can be started again.")
              : t("It can be resumed from step {{step}}.", { step: job.checkpoint_step })}
          </Text>
          {cancel.error !== null && <Failure error={cancel.error} />}
          <Group justify="end">
            <Button variant="default" onClick={question.close} data-autofocus>
              {t("Keep it")}
            </Button>
            <Button color="red" loading={cancel.isPending} onClick={() => cancel.mutate()}>
              {t("Cancel job")}
            </Button>
          </Group>
        </Stack>
      </Modal>
    </Group>
  );
}
