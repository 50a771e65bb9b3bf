import { Alert, Group, Progress as Bar, SimpleGrid, Stack, Text } from "@mantine/core";

import { useTranslation } from "react-i18next";

import type { Job } from "../../api/types";
import { Figure } from "../../components/Figure";
import { sentence } from "../../components/Feedback";
import { count, duration, loss, si } from "../../format";
import { useNow } from "../../useNow";
import { etaS, progressOf, shareOf, speedUnit, tokensPerStep } from "./eta";

export function Progress({ job }: { job: Job }) {
  const { t } = useTranslation();
  const isRunning = job.state === "running";
  const now = useNow(isRunning);
  const share = shareOf(job);
  const { done, total, unit } = progressOf(job);
  const numbers = { done: count(done), total: count(total) };
  const words =
    unit === "steps"
      ? t("Step {{done}} of {{total}}", numbers)
      : unit === "trials"
        ? t("Trials that are over: {{done}} of {{total}}", numbers)
        : t("Rows: {{done}} of {{total}}", numbers);
  const eta = isRunning ? etaS(job, tokensPerStep(job)) : null;
  return (
    <Stack gap="md">
      {job.state === "failed" ? <Reason job={job} /> : <Text size="sm">{sentence(job.reason)}</Text>}
      <div>
        <Bar.Root size="lg">
          <Bar.Section
            value={100 * share}
            color={job.state === "failed" ? "red" : job.state === "succeeded" ? "green" : "lagoon"}
            animated={isRunning}
            aria-label={t("Progress")}
            aria-valuetext={words}
          />
        </Bar.Root>
        <Group justify="space-between" mt={6}>
          <Text size="sm" c="dimmed">
            {words}
            {job.rows != null && job.rows.failed > 0 && ` · ${t("{{number}} with an error", { number: count(job.rows.failed) })}`}
            {job.checkpoint_step !== null && ` · ${t("checkpoint at {{step}}", { step: count(job.checkpoint_step) })}`}
            {job.state === "running" && job.is_protected === true && (
              <span title={t("Every layer is on two machines: losing any one of them costs no step.")}>{` · ${t("protected")}`}</span>
            )}
          </Text>
          <Text size="sm" c="dimmed">
            {Math.floor(100 * share)} %
          </Text>
        </Group>
      </div>
      <SimpleGrid cols={{ base: 2, sm: 4 }} spacing="sm">
        {unit === "steps" ? (
          <Figure label={t("Loss")} value={job.loss === null ? "–" : loss(job.loss)} />
        ) : unit === "trials" ? null : (
          <Figure label={t("Rows per second")} value={job.rows?.rows_per_s == null ? "–" : job.rows.rows_per_s.toPrecision(3)} />
        )}
        {unit !== "trials" && <Figure label={t("Speed")} value={job.tokens_per_s === null ? "–" : si(job.tokens_per_s, speedUnit(job))} />}
        <Figure label={t("Running for")} value={elapsed(job, now)} />
        {unit !== "trials" && <Figure label={t("Time left")} value={eta === null ? "–" : duration(eta)} title={t("at the speed measured last")} />}
      </SimpleGrid>
    </Stack>
  );
}

function Reason({ job }: { job: Job }) {
  const hint = typeof job.error?.hint === "string" ? job.error.hint : undefined;
  return (
    <Alert className="failure" title={sentence(job.reason)}>
      {hint !== undefined && sentence(hint)}
    </Alert>
  );
}

function elapsed(job: Job, now: number): string {
  if (job.started_at === null) return "–";
  const end = job.finished_at === null ? now : Date.parse(job.finished_at);
  return duration(Math.max(0, (end - Date.parse(job.started_at)) / 1000));
}
