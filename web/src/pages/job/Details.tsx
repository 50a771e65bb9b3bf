/** Tabs of a job's page, one of which is shown: one step, rounds, the plan, predictions, samples, and results. */
import { Tabs, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { artifacts, checkpoints, log, pictures } from "../../api/queries";
import type { Job } from "../../api/types";
import { Idle } from "../../placement/Idle";
import { MemberTable } from "../../placement/MemberTable";
import classes from "./Job.module.css";
import { Reality } from "./Reality";
import { Artifacts } from "./results/Artifacts";
import { Checkpoints } from "./results/Checkpoints";
import { Links } from "./results/Links";
import { Pictures } from "./results/Pictures";
import { Samples, samplesIn } from "./results/Samples";
import { Rounds } from "./rounds/Rounds";
import { mergingOf, roundsIn } from "./rounds/rounds";
import type { Part } from "./search";
import { Timeline } from "./timeline/Timeline";

/**
 * An ended job shows its results first, other jobs the work of their machines. The single step is last, because it is
 * planned on demand.
 */
const RESULTS_FIRST: readonly Part[] = ["predictions", "results", "samples", "rounds", "plan", "step"];
const WORK_FIRST: readonly Part[] = ["rounds", "plan", "step", "predictions", "samples", "results"];

interface Props {
  job: Job;
  /** Shown to the right; uses the whole width if there is no tab. */
  beside?: ReactNode;
}

export function Details({ job, beside }: Props) {
  const { t } = useTranslation();
  const { part: chosen } = useSearch({ from: "/jobs/$jobId" });
  const navigate = useNavigate({ from: "/jobs/$jobId" });
  const parts = useParts(job);
  const isOver = job.finished_at !== null;
  const shown = parts.find(({ part }) => part === chosen) ?? firstOf(parts, isOver ? RESULTS_FIRST : WORK_FIRST);
  if (shown === undefined) return beside;
  const tabs = (
    <Tabs
      className="card"
      value={shown.part}
      keepMounted={false}
      onChange={(part) => void navigate({ search: (old) => ({ ...old, part: part as Part }), replace: true, resetScroll: false })}
    >
      <Tabs.List aria-label={t("Details")}>
        {parts.map(({ part, title }) => (
          <Tabs.Tab key={part} value={part}>
            {title}
          </Tabs.Tab>
        ))}
      </Tabs.List>
      {parts.map(({ part, content }) => (
        <Tabs.Panel key={part} value={part} className={classes.panel!}>
          <div className={classes.part}>{content}</div>
        </Tabs.Panel>
      ))}
    </Tabs>
  );
  if (beside === undefined) return tabs;
  return (
    <div className={classes.columns}>
      {tabs}
      {beside}
    </div>
  );
}

interface Titled {
  part: Part;
  title: string;
  content: ReactNode;
}

/** The parts that have something to show. */
function useParts(job: Job): Titled[] {
  const { t } = useTranslation();
  const events = useQuery(log(job.id)).data;
  const hasPictures = (useQuery(pictures(job.id)).data ?? []).length > 0;
  const hasArtifacts = (useQuery(artifacts(job.id)).data ?? []).length > 0;
  const saved = useQuery({ ...checkpoints(job.id), enabled: job.spec.kind === "train" }).data ?? [];
  const samples = useMemo(() => samplesIn(events ?? []), [events]);
  const policy = job.spec.kind === "train" && job.spec.training.synchronization.kind !== "allreduce" ? job.spec.training.synchronization : null;
  const rounds = useMemo(() => (policy === null ? [] : roundsIn(events ?? [], mergingOf(policy))), [events, policy]);
  const { plan, links } = job;
  const branch = plan?.branches[0];
  const isInLockstep = policy?.kind === "auto" && plan !== null && branch === undefined;
  const found: (Titled | false)[] = [
    plan !== null && {
      part: "step",
      title: branch === undefined ? t("One step") : t("One step of branch {{number}}", { number: branch.number }),
      content: <Timeline job={job} plan={plan} />,
    },
    policy !== null && !isInLockstep && { part: "rounds", title: t("Rounds"), content: <Rounds rounds={rounds} /> },
    plan !== null && {
      part: "plan",
      title: t("Plan"),
      content: (
        <>
          <Reality job={job} plan={plan} />
          <MemberTable plan={plan} />
          <Idle machines={plan.idle} />
        </>
      ),
    },
    hasPictures && { part: "predictions", title: t("Predictions"), content: <Pictures job={job} /> },
    samples.length > 0 && { part: "samples", title: t("Samples"), content: <Samples samples={samples} /> },
    (links.length > 0 || hasArtifacts || saved.length > 0) && {
      part: "results",
      title: t("Results"),
      content: (
        <>
          {links.length > 0 && (
            <Named title={t("Afterwards")}>
              <Links job={job} />
            </Named>
          )}
          {hasArtifacts && (
            <Named title={t("Artifacts")}>
              <Artifacts job={job} />
            </Named>
          )}
          {saved.length > 0 && (
            <Named title={t("Checkpoints")}>
              <Checkpoints job={job} />
            </Named>
          )}
        </>
      ),
    },
  ];
  return found.filter((one) => one !== false);
}

function Named({ title, children }: { title: string; children: ReactNode }) {
  return (
    <section aria-label={title} className={classes.named}>
      <Title order={3} fz="sm">
        {title}
      </Title>
      {children}
    </section>
  );
}

function firstOf(parts: readonly Titled[], order: readonly Part[]): Titled | undefined {
  return [...parts].sort((a, b) => order.indexOf(a.part) - order.indexOf(b.part))[0];
}
