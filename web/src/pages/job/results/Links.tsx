import { Button, Text } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import type { TFunction } from "i18next";
import { useTranslation } from "react-i18next";

import { api, body } from "../../../api/client";
import { job as jobQuery } from "../../../api/queries";
import { useOwns } from "../../../api/scopes";
import type { Job } from "../../../api/types";
import { Failure, sentence } from "../../../components/Feedback";
import { AnchorLink } from "../../../components/links";
import { StateBadge } from "../../../components/StateBadge";
import classes from "./Artifacts.module.css";

type Link = Job["links"][number];

/** The deployment and the batch that start from the job's result, and a button to restart failed ones. */
export function Links({ job }: { job: Job }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const isOurs = useOwns(job.owner);
  const again = useMutation({
    mutationFn: () => body(api.POST("/api/v1/jobs/{job_id}/resume", { params: { path: { job_id: job.id } } })),
    onSuccess: (changed) => client.setQueryData(jobQuery(job.id).queryKey, changed),
  });
  const hasFailed = job.state === "succeeded" && job.links.some(({ state }) => state === "failed");
  return (
    <>
      <ul className={classes.files}>
        {job.links.map((link) => (
          <li key={link.name} className={classes.file}>
            <Text size="sm">{nameOf(link, t)}</Text>
            <StateBadge state={link.state} />
            <Text size="sm" c="dimmed" className={classes.path}>
              {sentence(link.reason)} {typeof link.error?.hint === "string" && sentence(link.error.hint)}
            </Text>
            {link.started != null && <Started link={link} id={link.started} />}
          </li>
        ))}
      </ul>
      {again.error !== null && <Failure error={again.error} />}
      {hasFailed && isOurs && (
        <Button size="xs" variant="default" loading={again.isPending} onClick={() => again.mutate()} w="fit-content">
          {t("Start them again")}
        </Button>
      )}
    </>
  );
}

function Started({ link, id }: { link: Link; id: string }) {
  const { t } = useTranslation();
  if (link.name === "generate") {
    return (
      <AnchorLink size="sm" to="/jobs/$jobId" params={{ jobId: id }}>
        {t("Show the batch")}
      </AnchorLink>
    );
  }
  // Linked by id, because another deployment may have the name by now.
  return (
    <AnchorLink size="sm" to="/deployments/$name" params={{ name: id }}>
      {t("Show the deployment")}
    </AnchorLink>
  );
}

function nameOf({ name }: Link, t: TFunction): string {
  return name === "serve" ? t("Serve the result") : t("Answer rows with the result");
}
