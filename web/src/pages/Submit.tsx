/** Submits a job or a deployment: a form made from the schema, or YAML, with a preview of the plan. */
import "@mantine/core/styles/Checkbox.css";

import { Alert, Button, Group, SegmentedControl, Stack, Text } from "@mantine/core";
import { useMutation, useQuery } from "@tanstack/react-query";
import { getRouteApi, useNavigate } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { Trans, useTranslation } from "react-i18next";

import { ApiProblem } from "../api/problem";
import { job, jobSchema, uploads } from "../api/queries";
import { deployYaml, submitJob } from "../api/submit";
import { Failure, Loading } from "../components/Feedback";
import { Page } from "../components/frame/Page";
import { translated } from "../i18n/texts";
import { Draft } from "./submit/draft";
import { textOf } from "./submit/starts/earlier";
import { Editor } from "./submit/editor/Editor";
import { JobForm } from "./submit/form/JobForm";
import { locate, syntaxProblems } from "./submit/editor/locate";
import { DataPreview } from "./submit/DataPreview";
import { PlanPreview } from "./submit/PlanPreview";
import { placed } from "./submit/schema/problems";
import { readSchema, type Schema } from "./submit/schema/schema";
import { StartCards } from "./submit/starts/StartCards";
import { STARTS } from "./submit/starts/starts";
import { Uploads } from "./submit/uploads/Uploads";
import { useCheck } from "./submit/useCheck";
import classes from "./Submit.module.css";

const route = getRouteApi("/submit");
const SPEC_KINDS = ["train", "generate", "embed", "sparse", "sweep", "serve"] as const;
type SpecKind = (typeof SPEC_KINDS)[number];

/** The changed text of each example or earlier job, so that changes survive a look at another one. */
type Drafts = Readonly<Record<string, string>>;

export function Submit() {
  const { from, start = "digits" } = route.useSearch();
  const { t } = useTranslation();
  const [drafts, setDrafts] = useState<Drafts>({});
  const name = from ?? start;
  const kept = {
    draft: drafts[name],
    onDraft: (text: string | undefined) => setDrafts(({ [name]: _, ...others }) => (text === undefined ? others : { ...others, [name]: text })),
  };
  return (
    <Page title={t("Submit a job")}>
      <StartCards chosen={from === undefined ? start : undefined} changed={new Set(Object.keys(drafts))} />
      {from === undefined ? <Workshop key={name} first={STARTS[start]} {...kept} /> : <FromEarlier key={name} id={from} {...kept} />}
    </Page>
  );
}

interface Kept {
  draft: string | undefined;
  /** Keep a changed text; undefined if it equals the original again. */
  onDraft: (text: string | undefined) => void;
}

function FromEarlier({ id, ...kept }: { id: string } & Kept) {
  const earlier = useQuery(job(id));
  const kind = specKind(earlier.data?.kind);
  const schema = useQuery({ ...jobSchema(kind), enabled: earlier.data !== undefined });
  const known = useQuery(uploads);
  const error = earlier.error ?? schema.error ?? known.error;
  if (error !== null) return <Failure error={error} retry={() => void earlier.refetch()} />;
  if (earlier.data === undefined || schema.data === undefined || known.data === undefined) return <Loading />;
  return <Workshop first={textOf(earlier.data, readSchema(schema.data as Schema), known.data.uploads)} from={id} {...kept} />;
}

function specKind(value: unknown): SpecKind {
  return SPEC_KINDS.find((kind) => kind === value) ?? "train";
}

function Workshop({ first, from, draft: kept, onDraft }: { first: string; from?: string } & Kept) {
  const { t } = useTranslation();
  const { view = "form" } = route.useSearch();
  const navigate = useNavigate({ from: "/submit" });
  const text = kept ?? first;
  const [sendingFiles, setSendingFiles] = useState(0);
  const draft = useMemo(() => new Draft(text), [text]);
  const kind = specKind(draft.get(["kind"]));
  const schema = useQuery(jobSchema(kind));
  const root = useMemo(() => (schema.data === undefined ? undefined : readSchema(schema.data as Schema)), [schema.data]);

  const syntax = useMemo(() => syntaxProblems(text), [text]);
  const checked = useCheck(text, syntax.length === 0);
  // One idempotency key per text, so that a second click, or a retry after a lost response, creates no second job.
  const idempotencyKey = useMemo(() => randomKey(), [text]);
  const sending = useMutation({
    mutationFn: async () =>
      kind === "serve" ? { ...(await deployYaml(text)), isServed: true } : { ...(await submitJob(text, idempotencyKey)), isServed: false },
    onSuccess: ({ id, name, isServed }) =>
      isServed ? navigate({ to: "/deployments/$name", params: { name } }) : navigate({ to: "/jobs/$jobId", params: { jobId: id } }),
  });
  const isOwn = text !== first;
  const refusal = sending.error instanceof ApiProblem && sending.error.fields.length > 0 ? sending.error : undefined;
  // Problems of an unchanged example are not shown.
  const problems = refusal?.fields ?? (isOwn || from !== undefined ? checked.problems : []);
  const { hint } = refusal ?? checked;
  const change = (next: string) => {
    onDraft(next === first ? undefined : next);
    sending.reset();
  };
  const places = useMemo(() => (root === undefined ? new Map() : placed(problems, root)), [problems, root]);
  const marked = syntax.length > 0 ? syntax : locate(text, problems);

  return (
    <Stack gap="md">
      <Group gap="sm" justify="space-between">
        <Group gap="sm">
          {from !== undefined && <Text size="sm">{t("From {{job}}", { job: from })}</Text>}
          {isOwn && (
            <Button variant="subtle" size="compact-sm" onClick={() => change(first)}>
              {t("Undo all changes")}
            </Button>
          )}
        </Group>
        <SegmentedControl
          aria-label={t("Form or YAML")}
          value={view}
          onChange={(next) => void navigate({ search: (old) => ({ ...old, view: next === "yaml" ? "yaml" : undefined }), replace: true })}
          data={[
            { value: "form", label: t("Form") },
            { value: "yaml", label: "YAML" },
          ]}
        />
      </Group>
      <div className={classes.columns}>
        <Stack gap="md" className={classes.main!}>
          {view === "yaml" ? (
            <>
              <Editor label={t("Job as YAML")} text={text} onChange={change} problems={marked} />
              <Text size="sm" c="dimmed">
                <Trans
                  i18nKey="The same file works with <code>share-compute submit job.yaml</code>. The form keeps the order and the comments of the file, except comments beside parts that it removes."
                  components={{ code: <code /> }}
                />
              </Text>
            </>
          ) : draft.value === null ? (
            <Alert className="failure" title={t("The YAML cannot be parsed, so there is no form for it.")}>
              <Button size="xs" variant="default" onClick={() => void navigate({ search: (old) => ({ ...old, view: "yaml" }) })}>
                {t("Fix the YAML")}
              </Button>
            </Alert>
          ) : schema.error !== null ? (
            <Failure error={schema.error} retry={() => void schema.refetch()} />
          ) : root === undefined ? (
            <Loading />
          ) : (
            <JobForm
              root={root}
              kind={kind}
              draft={draft}
              problems={places}
              onText={change}
              onSending={(by) => setSendingFiles((number) => number + by)}
            />
          )}
        </Stack>
        <div className={classes.aside}>
          <PlanPreview draft={draft} kind={kind} isGood={checked.isGood} />
          {kind === "train" && draft.value !== null && <DataPreview text={text} />}
          <Uploads />
        </div>
      </div>
      {sending.error !== null && refusal === undefined && <Failure error={sending.error} />}
      {checked.error !== null && sending.error === null && <Failure error={checked.error} />}
      <Group justify="space-between" className={classes.bar!}>
        <Text size="sm" c="dimmed" role="status">
          {sendingFiles > 0
            ? t("Files are on their way to the server.")
            : problems.length > 0
              ? [t("{{count}} problems", { count: problems.length }), hint && translated(hint)].filter(Boolean).join(": ")
              : checked.isGood
                ? t("The server would accept this job.")
                : ""}
        </Text>
        <Button onClick={() => sending.mutate()} loading={sending.isPending} disabled={syntax.length > 0 || sendingFiles > 0}>
          {kind === "serve" ? t("Serve it") : t("Submit")}
        </Button>
      </Group>
    </Stack>
  );
}

/** 128 random bits; `crypto.randomUUID` is missing on pages that another machine serves over plain HTTP. */
function randomKey(): string {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16).padStart(8, "0")).join("");
}
