/** The list of first steps, with marks that follow the cluster. */
import { Code, Group, Text, Title, UnstyledButton } from "@mantine/core";
import { useInfiniteQuery } from "@tanstack/react-query";
import { useEffect, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { deployments, jobs } from "../../api/queries";
import { useMay } from "../../api/scopes";
import { AnchorLink, ButtonLink } from "../../components/links";
import { StateBadge } from "../../components/StateBadge";
import classes from "./FirstSteps.module.css";
import { after, become, useProgress, type Done } from "./steps";

/** Shown above `children`, or instead of them in a cluster without machines. */
export function FirstSteps({ machines, children }: { machines: number; children: ReactNode }) {
  const { t } = useTranslation();
  const progress = useProgress();
  const [mayInvite, maySubmit] = [useMay("admin"), useMay("submit")];
  const isAsked = progress === "begun" || (progress === "unknown" && machines === 0);
  const ofJobs = useInfiniteQuery({ ...jobs(), enabled: isAsked });
  const ofModels = useInfiniteQuery({ ...deployments("up"), enabled: isAsked });
  const known = ofJobs.data?.pages[0]?.jobs;
  const served = ofModels.data?.pages[0]?.deployments;
  const isKnown = isAsked && known !== undefined && served !== undefined;
  const [job] = known ?? [];
  const [model] = served ?? [];
  const done: Done = { machine: machines > 0, job: job !== undefined, model: model?.state === "ready" };
  const next = isKnown ? after(progress, done) : progress;
  useEffect(() => {
    if (next !== progress) become(next);
  }, [next, progress]);
  if (isAsked && !isKnown) return ofJobs.isError || ofModels.isError ? children : null;
  if (next !== "begun") return children;
  return (
    <>
      <section className="card" aria-label={t("First steps")}>
        <Group justify="space-between" className={classes.head!}>
          <Title order={2}>{t("First steps")}</Title>
          <UnstyledButton className={classes.dismiss} fz="sm" c="dimmed" onClick={() => become("over")}>
            {t("Dismiss")}
          </UnstyledButton>
        </Group>
        <ol className={classes.steps}>
          <Step
            isDone={done.machine}
            title={t("Add a machine")}
            action={
              mayInvite && (
                <ButtonLink to="/invites" variant={done.machine ? "default" : "filled"} size="xs">
                  {t("Create an invite")}
                </ButtonLink>
              )
            }
          >
            {done.machine ? (
              t("{{count}} machines joined", { count: machines })
            ) : (
              <>
                {t("Run the invite's line on the machine that lends its power, or lend this one with")}{" "}
                <Code>share-compute up --contribute</Code>
              </>
            )}
          </Step>
          <Step
            isDone={done.job}
            title={t("Submit a job")}
            action={
              job === undefined ? (
                maySubmit && (
                  <ButtonLink to="/submit" variant={done.machine ? "filled" : "default"} size="xs">
                    {t("Open the demo job")}
                  </ButtonLink>
                )
              ) : (
                <StateBadge state={job.state} />
              )
            }
          >
            {job === undefined ? (
              t("The demo job trains a classifier of handwritten digits. Its data comes with the server, so it runs as it stands.")
            ) : (
              <AnchorLink to="/jobs/$jobId" params={{ jobId: job.id }} size="sm">
                {job.name}
              </AnchorLink>
            )}
          </Step>
          <Step
            isDone={done.model}
            title={t("Serve a model")}
            action={
              model === undefined ? (
                maySubmit && (
                  <ButtonLink to="/submit" search={{ start: "language" }} variant={done.job ? "filled" : "default"} size="xs">
                    {t("Train a language model")}
                  </ButtonLink>
                )
              ) : (
                <StateBadge state={model.state} />
              )
            }
          >
            {model === undefined ? (
              t("Train a language model on a text of yours; its page offers to serve the result.")
            ) : (
              <AnchorLink to="/playground" search={{ with: model.name }} size="sm">
                {model.name}
              </AnchorLink>
            )}
          </Step>
        </ol>
      </section>
      {machines > 0 && children}
    </>
  );
}

function Step({ isDone, title, action, children }: { isDone: boolean; title: string; action: ReactNode; children: ReactNode }) {
  const { t } = useTranslation();
  return (
    <li className={classes.step} data-done={isDone}>
      <svg viewBox="0 0 24 24" width={24} height={24} role="img" aria-label={isDone ? t("done") : t("to do")} className={classes.mark}>
        <circle cx="12" cy="12" r="10" />
        {isDone && <path d="M7 12.5l3.5 3.5 6.5-7.5" />}
      </svg>
      <div>
        <Text fw={600} size="sm">
          {title}
        </Text>
        <Text size="sm" c="dimmed" component="div">
          {children}
        </Text>
      </div>
      <div className={classes.action}>{action}</div>
    </li>
  );
}
