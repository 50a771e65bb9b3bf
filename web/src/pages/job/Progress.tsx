/** The most important figures in large numerals, above the progress bar. */
import { Progress as Bar, Text } from "@mantine/core";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useEffect, useMemo, useState, type ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { job as jobQuery, log, metrics, trials } from "../../api/queries";
import { isGone, type ClusterEvent, type Job } from "../../api/types";
import { count, duration, hourAndMinute, loss, si, significant, stepTime } from "../../format";
import { translated } from "../../i18n/texts";
import { useNow } from "../../useNow";
import { latestProgress, meanSeconds, progressOf, shareOf, speedUnit, stallLimitS, timeLeftS, timesOf } from "./eta";
import { nameOfResult } from "./figures";
import classes from "./Job.module.css";
import { idsInPlan, type Members } from "./members";

export function Progress({ job, members }: { job: Job; members: Members | undefined }) {
  const { t } = useTranslation();
  const isRunning = job.state === "running";
  const now = useNow(isRunning);
  const measured = useQuery({ ...metrics(job.id), enabled: job.spec.kind === "train" || job.spec.kind === "sparse" }).data;
  const events = useQuery(log(job.id)).data;
  const mean = useMemo(() => meanSeconds(timesOf(measured ?? [], events ?? [])), [measured, events]);
  const stalledS = useStall(job, events ?? [], mean, now);
  const { done, total, unit } = progressOf(job);
  const numbers = { done: count(done), total: count(total) };
  const words =
    unit === "steps"
      ? t("Step {{done}} of {{total}}", numbers)
      : unit === "trials"
        ? t("Trials that are over: {{done}} of {{total}}", numbers)
        : t("Rows: {{done}} of {{total}}", numbers);
  return (
    <section className={`card ${classes.readout}`} aria-label={t("Progress")}>
      <div className={classes.numerals}>
        <Result job={job} validation={measured?.findLast((metric) => metric.split === "validation")?.data.loss} />
        {isRunning ? (
          stalledS !== null ? (
            <Numeral label={t("No progress for")} value={duration(stalledS)} note={mean === null ? "" : t("{{time}} a step until then", { time: stepTime(mean) })} isAlarm />
          ) : (
            unit !== "trials" && <TimeLeft seconds={timeLeftS(job, mean)} now={now} />
          )
        ) : (
          <Numeral label={t("Ran for")} value={elapsed(job, now)} />
        )}
        {unit !== "trials" && (
          <>
            <AtWork job={job} members={members} />
            <Numeral
              label={t("Speed")}
              {...(job.tokens_per_s === null ? { value: "–" } : inParts(si(job.tokens_per_s, t(speedUnit(job)))))}
              note={mean !== null && unit === "steps" ? t("{{time}} a step", { time: stepTime(mean) }) : undefined}
            />
          </>
        )}
      </div>
      <div className={classes.bar}>
        <Bar.Root size="md">
          <Bar.Section
            value={100 * shareOf(job)}
            color={job.state === "failed" ? "red" : job.state === "succeeded" ? "green" : "lagoon"}
            aria-label={t("Progress")}
            aria-valuetext={words}
          />
        </Bar.Root>
        <span className={classes.percent}>{Math.floor(100 * shareOf(job))}%</span>
        <Text size="sm" c="dimmed">
          {words}
          {job.rows != null && job.rows.failed > 0 && ` · ${t("{{number}} with an error", { number: count(job.rows.failed) })}`}
          {job.checkpoint_step !== null && ` · ${t("checkpoint at {{step}}", { step: count(job.checkpoint_step) })}`}
          {isRunning && job.is_protected === true && (
            <span title={t("Every layer is on two machines: losing any one of them costs no step.")}>{` · ${t("protected")}`}</span>
          )}
          {job.computation != null && ` · ${translated(job.computation)}`}
          {isRunning && ` · ${t("running for {{time}}", { time: elapsed(job, now) })}`}
        </Text>
      </div>
    </section>
  );
}

interface NumeralProps {
  label: string;
  value: string;
  unit?: string;
  note?: ReactNode;
  isAlarm?: boolean;
}

/** One large figure. */
function Numeral({ label, value, unit, note, isAlarm = false }: NumeralProps) {
  return (
    <dl className={classes.numeral} data-alarm={isAlarm}>
      <dt>{label}</dt>
      <dd className={classes.value}>
        {value}
        {unit !== undefined && <small> {unit}</small>}
      </dd>
      <dd className={classes.note}>{note}</dd>
    </dl>
  );
}

/** The main figure of the job: its loss, the best trial, or the rows per second. */
function Result({ job, validation }: { job: Job; validation: unknown }) {
  const { t } = useTranslation();
  const isSweep = job.spec.kind === "sweep";
  const sweep = useQuery({ ...trials(job.id), enabled: isSweep }).data;
  if (isSweep) {
    const best = sweep?.trials.find((trial) => trial.number === sweep.best);
    return (
      <Numeral
        label={sweep === undefined ? t("Best") : t("Best {{figure}}", { figure: nameOfResult(sweep.metric) })}
        value={best?.value == null ? "–" : significant(best.value, 4)}
        note={best !== undefined && t("trial {{number}}", { number: best.number })}
      />
    );
  }
  if (job.spec.kind !== "train" && job.spec.kind !== "sparse") {
    return <Numeral label={t("Rows per second")} value={job.rows?.rows_per_s == null ? "–" : job.rows.rows_per_s.toPrecision(3)} />;
  }
  return (
    <Numeral
      label={t("Loss")}
      value={job.loss === null ? "–" : loss(job.loss)}
      note={typeof validation === "number" && t("validation {{loss}}", { loss: loss(validation) })}
    />
  );
}

function TimeLeft({ seconds, now }: { seconds: number | null; now: number }) {
  const { t } = useTranslation();
  const isLong = seconds !== null && seconds >= 60;
  return (
    <Numeral
      label={t("Time left")}
      value={seconds === null ? "–" : duration(seconds)}
      note={isLong && seconds < 86_400 && t("until about {{time}}", { time: hourAndMinute(now + 1000 * seconds) })}
    />
  );
}

function AtWork({ job, members }: { job: Job; members: Members | undefined }) {
  const { t } = useTranslation();
  const isOpen = job.state === "running" || job.state === "planning";
  const gone = isOpen ? (members ?? []).filter(isGone) : [];
  // Machines that left since then are missing from the cluster.
  const all = idsInPlan(job)?.size ?? members?.length ?? 0;
  return (
    <Numeral
      label={isOpen || job.state === "queued" ? t("Machines at work") : t("Machines")}
      value={all === 0 ? "–" : count(all - gone.length)}
      note={gone.length > 0 && t("without {{names}}", { names: gone.map(({ name }) => name).join(", ") })}
      isAlarm={gone.length > 0}
    />
  );
}

/**
 * Seconds without progress of a running job, if this is long compared with its steps; otherwise null. The connection is
 * checked first, because without it no events arrive.
 */
function useStall(job: Job, events: readonly ClusterEvent[], mean: number | null, now: number): number | null {
  const client = useQueryClient();
  const [before, setBefore] = useState(() => latestProgress(undefined, job, events, Date.now()));
  // `now` is constant while the job does not run.
  const progress = latestProgress(before, job, events, Date.now());
  if (progress !== before) setBefore(progress);
  const { at } = progress;
  const limitMs = mean === null ? Infinity : 1000 * stallLimitS(mean);
  const mayBe = job.state === "running" && now - at > limitMs;
  const { queryKey } = jobQuery(job.id);
  const isConfirmed = mayBe && (client.getQueryState(queryKey)?.dataUpdatedAt ?? 0) - at > limitMs;
  useEffect(() => {
    if (mayBe && !isConfirmed) void client.invalidateQueries({ queryKey, exact: true });
  }, [mayBe, isConfirmed, job.id]);
  return isConfirmed ? (now - at) / 1000 : null;
}

/** "3.20 ktok/s" as a number and a smaller unit. */
function inParts(text: string): { value: string; unit: string } {
  const [value = "", unit = ""] = text.split(" ");
  return { value, unit };
}

function elapsed(job: Job, now: number): string {
  if (job.started_at === null) return "–";
  const end = job.finished_at === null ? now : Date.parse(job.finished_at);
  return duration(Math.max(0, (end - Date.parse(job.started_at)) / 1000));
}
