import { Button, Group, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { artifact, artifacts } from "../../../api/queries";
import type { Artifact, Job } from "../../../api/types";
import { Failure, Waiting } from "../../../components/Feedback";
import { bytes } from "../../../format";
import classes from "./Artifacts.module.css";
import { download } from "./download";

/** The results, file by file. */
export function Artifacts({ job }: { job: Job }) {
  const { data, error, refetch } = useQuery(artifacts(job.id));
  if (data === undefined) return <Waiting error={error} refetch={refetch} lines={2} />;
  return (
    <Stack gap="lg">
      {data.map((one) => (
        <Files key={one.name} jobId={job.id} summary={one} />
      ))}
    </Stack>
  );
}

function Files({ jobId, summary }: { jobId: string; summary: Artifact }) {
  const { t } = useTranslation();
  const { data, error } = useQuery(artifact(jobId, summary.name));
  return (
    <div>
      <Group gap="sm" mb="xs">
        <Text fw={600}>{summary.name}</Text>
        <Text size="sm" c="dimmed">
          {bytes(summary.size_bytes)} · {t("all of it:")} <code className={classes.command}>share-compute artifacts get {jobId} {summary.name}</code>
        </Text>
      </Group>
      {error !== null && <Failure error={error} />}
      <ul className={classes.files}>
        {data?.files.map((file) => (
          <File key={file.path} jobId={jobId} artifactName={summary.name} path={file.path} sizeBytes={file.size_bytes} />
        ))}
      </ul>
    </div>
  );
}

interface FileProps {
  jobId: string;
  artifactName: string;
  path: string;
  sizeBytes: number;
}

function File({ jobId, artifactName, path, sizeBytes }: FileProps) {
  const { t } = useTranslation();
  return (
    <li className={classes.file}>
      <Text size="sm" ff="monospace" className={classes.path}>
        {path}
      </Text>
      <Text size="sm" c="dimmed">
        {bytes(sizeBytes)}
      </Text>
      <Button
        size="compact-sm"
        variant="default"
        onClick={() => download(jobId, artifactName, path)}
        aria-label={t("Download {{path}}", { path })}
      >
        {t("Download")}
      </Button>
    </li>
  );
}
