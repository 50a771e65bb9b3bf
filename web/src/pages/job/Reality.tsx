/** What the plan predicted, beside what was measured, and what a step waits for most. */
import { Text } from "@mantine/core";

import type { Job, Plan, Prediction } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { difference, stepTime } from "../../format";

export function Reality({ job, plan }: { job: Job; plan: Plan }) {
  const { prediction } = plan;
  const measured = job.measured ?? null;
  if (prediction == null && measured === null) return null;
  return (
    <div>
      <Text size="sm">{stepWords(prediction?.step_s, measured?.measured_step_s)}</Text>
      {prediction != null && (
        <Text size="sm" c="dimmed">
          Slowest part: {prediction.bottleneck.sentence}. {boundWords(prediction)}
        </Text>
      )}
      {measured !== null && measured.pools.length > 1 && (
        <Text size="sm" c="dimmed">
          Busy in a step: {measured.pools.map((pool, index) => `pool ${index + 1} ${busyWords(pool)}`).join("; ")}.
        </Text>
      )}
      {job.proposal != null && <Text size="sm">{sentence(`a better plan: ${job.proposal.sentence}`)}</Text>}
    </div>
  );
}

function stepWords(predicted?: number, measured?: number): string {
  if (measured === undefined) return `A step should take ${stepTime(predicted ?? 0)}.`;
  if (predicted === undefined) return `A step takes ${stepTime(measured)}.`;
  return `A step takes ${stepTime(measured)}; predicted ${stepTime(predicted)} (${difference(measured, predicted)}).`;
}

/** How good the plan is known to be, as `share-compute plan` says it. */
function boundWords({ gap, lower_bound_s, exact }: Prediction): string {
  const proof = exact ? "proven best by the formula" : "the best that was found";
  if (gap === null) return `It is ${proof}.`;
  const above = gap > 0.0005 ? `this one is ${(gap * 100).toFixed(1)}% above` : "this one takes no more";
  return `No plan takes less than ${stepTime(lower_bound_s)}; ${above}, ${proof}.`;
}

function busyWords(pool: { measured_busy_s: number; predicted_busy_s?: number | null }): string {
  const predicted = pool.predicted_busy_s == null ? "" : `, predicted ${stepTime(pool.predicted_busy_s)}`;
  return `${stepTime(pool.measured_busy_s)}${predicted}`;
}
