/** A short form for a new deployment; the command line and REST have more options. */
import { Button, Group, NativeSelect, SegmentedControl, SimpleGrid, Stack, Text, TextInput } from "@mantine/core";
import { useInfiniteQuery, useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useState, type FormEvent } from "react";
import { useTranslation } from "react-i18next";

import { deploy, type WantedDeployment } from "../../api/submit";
import { ApiProblem } from "../../api/problem";
import { deployment as deploymentQuery, jobs, jobSchema } from "../../api/queries";
import { Failure, sentence } from "../../components/Feedback";
import { ButtonLink } from "../../components/links";
import { Section } from "../../components/frame/Page";
import { readSchema, type Schema } from "../submit/schema/schema";
import classes from "./Deployments.module.css";
import { nameFrom, range } from "./facts";

/** Fields that have an input; problems of all other fields are shown below the form. */
const PLACES = ["name", "model.path", "model.job", "model.artifact", "replicas", "replicas.min", "replicas.max", "max_seq", "dtype", "compile", "objective"];

interface Props {
  job?: string;
  artifact?: string;
  path?: string;
}

export function DeployForm({ job: firstJob = "", artifact: firstArtifact = "model", path: firstPath = "" }: Props) {
  const { t } = useTranslation();
  const navigate = useNavigate();
  const client = useQueryClient();
  const [source, setSource] = useState<"path" | "job">(firstJob === "" ? "path" : "job");
  const [path, setPath] = useState(firstPath);
  const [job, setJob] = useState(firstJob);
  const [artifact, setArtifact] = useState(firstArtifact);
  const [ownName, setName] = useState<string | null>(null);
  const [min, setMin] = useState("1");
  const [max, setMax] = useState("1");
  const [maxSeq, setMaxSeq] = useState("");
  const [dtype, setDtype] = useState("float32");
  const [compile, setCompile] = useState("off");
  const [objective, setObjective] = useState("latency");
  const results = useTrained();
  const suggested = source === "path" ? nameFrom(path) : nameFrom(results.find((one) => one.id === job)?.name ?? job);
  const name = ownName ?? suggested;

  const sending = useMutation({
    mutationFn: () => {
      const wanted: WantedDeployment = {
        name: name.trim(),
        model: source === "path" ? { path: path.trim() } : { job: job.trim(), artifact: artifact.trim() },
        replicas: range({ min: Number(min), max: Math.max(Number(min), Number(max)) }),
        dtype,
        compile,
        objective,
        ...(maxSeq.trim() !== "" && { max_seq: Number(maxSeq) }),
      };
      return deploy(wanted);
    },
    onSuccess: (made) => {
      client.setQueryData(deploymentQuery(made.name).queryKey, made);
      return navigate({ to: "/deployments/$name", params: { name: made.name } });
    },
  });
  const { data: schema } = useQuery(jobSchema("serve"));
  /** The choices of a field according to the server's schema; the current value until the schema has arrived. */
  const choices = (field: string, present: string): string[] => {
    const found = schema && readSchema(schema as Schema).fields.find((one) => one.path[0] === field);
    return [...(found?.choices ?? [present])];
  };
  const aims: Record<string, string> = { latency: t("the shortest answer"), throughput: t("most tokens a second") };
  const compilings: Record<string, string> = { auto: t("if it is faster"), on: t("always"), off: t("never") };
  const refused = sending.error instanceof ApiProblem ? sending.error.fields : [];
  const wrong = (...fields: string[]) => {
    const found = refused.find((one) => fields.includes(one.field));
    return found === undefined ? undefined : sentence(found.problem);
  };
  const isElsewhere = sending.error !== null && !refused.some((one) => PLACES.includes(one.field));
  const submit = (event: FormEvent) => {
    event.preventDefault();
    sending.mutate();
  };
  return (
    <Section
      title={t("Deploy a model")}
      actions={
        <ButtonLink to="/models" search={{}} variant="subtle" size="compact-sm">
          {t("Close")}
        </ButtonLink>
      }
    >
      <form onSubmit={submit}>
        <Stack gap="md">
          <div>
            <SegmentedControl
              aria-label={t("Where the model comes from")}
              value={source}
              onChange={(value) => setSource(value as "path" | "job")}
              data={[
                { value: "path", label: t("Folder or upload") },
                { value: "job", label: t("Result of a job") },
              ]}
            />
          </div>
          {source === "path" ? (
            <TextInput
              label={t("Model")}
              description={t("A Hugging Face folder on the server, or the reference of an upload.")}
              placeholder="/srv/models/tiny-llama"
              required
              value={path}
              onChange={(event) => setPath(event.currentTarget.value)}
              error={wrong("model.path", "model")}
            />
          ) : (
            <SimpleGrid cols={{ base: 1, sm: 2 }} spacing="md">
              <NativeSelect
                label={t("Job")}
                description={t("Training jobs that succeeded.")}
                required
                value={job}
                onChange={(event) => setJob(event.currentTarget.value)}
                error={wrong("model.job", "model")}
                data={[
                  { value: "", label: results.length === 0 ? t("none yet") : t("choose one"), disabled: true },
                  ...(job !== "" && !results.some((one) => one.id === job) ? [{ value: job, label: job }] : []),
                  ...results.map((one) => ({ value: one.id, label: `${one.name} (${one.id})` })),
                ]}
              />
              <TextInput
                label={t("Artifact")}
                description={t("Which result of the job.")}
                required
                value={artifact}
                onChange={(event) => setArtifact(event.currentTarget.value)}
                error={wrong("model.artifact")}
              />
            </SimpleGrid>
          )}
          <SimpleGrid cols={{ base: 1, sm: 2, md: 3 }} spacing="md">
            <TextInput
              label={t("Name")}
              description={t("The name that clients send as model.")}
              required
              maxLength={80}
              value={name}
              onChange={(event) => setName(event.currentTarget.value)}
              error={wrong("name")}
            />
            <Group gap="sm" grow align="start" wrap="nowrap">
              <TextInput
                label={t("Fewest replicas")}
                description={t("0: no replicas while there are no requests.")}
                type="number"
                min={0}
                required
                value={min}
                onChange={(event) => setMin(event.currentTarget.value)}
                error={wrong("replicas", "replicas.min")}
              />
              <TextInput
                label={t("Most replicas")}
                description={t("As many as the load needs.")}
                type="number"
                min={1}
                required
                value={max}
                onChange={(event) => setMax(event.currentTarget.value)}
                error={wrong("replicas.max")}
              />
            </Group>
            <TextInput
              label={t("Longest sequence")}
              description={t("Tokens of a prompt and its answer together.")}
              placeholder={t("what the model was made for")}
              type="number"
              min={16}
              value={maxSeq}
              onChange={(event) => setMaxSeq(event.currentTarget.value)}
              error={wrong("max_seq")}
            />
            <NativeSelect
              label={t("Numbers")}
              description={t("The type that weights are loaded as.")}
              value={dtype}
              onChange={(event) => setDtype(event.currentTarget.value)}
              error={wrong("dtype")}
              data={choices("dtype", dtype)}
            />
            <NativeSelect
              label={t("Compiled code")}
              description={t("Whether layers are compiled for speed.")}
              value={compile}
              onChange={(event) => setCompile(event.currentTarget.value)}
              error={wrong("compile")}
              data={choices("compile", compile).map((value) => ({ value, label: compilings[value] ?? value }))}
            />
            <NativeSelect
              label={t("Objective")}
              description={t("The objective for choosing machines.")}
              value={objective}
              onChange={(event) => setObjective(event.currentTarget.value)}
              error={wrong("objective")}
              data={choices("objective", objective).map((value) => ({ value, label: aims[value] ?? value }))}
            />
          </SimpleGrid>
          {sending.error !== null && isElsewhere && <Failure error={sending.error} />}
          <Group justify="space-between">
            <Text size="sm" c="dimmed">
              {t("All other settings:")} <code className={classes.command}>share-compute serve --help</code>
            </Text>
            <Button type="submit" loading={sending.isPending}>
              {t("Deploy")}
            </Button>
          </Group>
        </Stack>
      </form>
    </Section>
  );
}

/** Jobs whose result can be served, newest first. */
function useTrained() {
  const { data } = useInfiniteQuery(jobs({ state: "succeeded", kind: "train", trials: true }));
  return data?.pages.flatMap((page) => page.jobs) ?? [];
}
