/** Predictions of the plan beside measurements, and the bottleneck of a step. */
import { Alert, Table, Text } from "@mantine/core";
import type { TFunction } from "i18next";
import { useTranslation } from "react-i18next";

import type { Job, Measured, Plan, Prediction } from "../../api/types";
import { TextAlternative } from "../../components/chart/TextAlternative";
import { sentence } from "../../components/Feedback";
import { MachineLink } from "../../components/MachineLink";
import { difference, stepTime } from "../../format";
import { layerRange } from "../../placement/layout";
import { Facts } from "./Facts";

export function Reality({ job, plan }: { job: Job; plan: Plan }) {
  const { t } = useTranslation();
  const { prediction } = plan;
  const measured = job.measured ?? null;
  if (prediction == null && measured === null) {
    return (
      <Text size="sm" c="dimmed">
        {t("There is no prediction for this plan, and too few steps were measured.")}
      </Text>
    );
  }
  const off = prediction != null && measured !== null ? difference(measured.measured_step_s, prediction.step_s) : undefined;
  return (
    <>
      <Facts
        of={[
          [t("Step, predicted"), prediction == null ? "–" : stepTime(prediction.step_s)],
          [t("Step, measured"), measured === null ? "–" : stepTime(measured.measured_step_s), t("median of the last steps")],
          [t("Off by"), off ?? "–"],
          [t("At best"), prediction == null ? "–" : stepTime(prediction.lower_bound_s), t("no plan for these machines takes less")],
        ]}
      />
      {prediction != null && (
        <Text size="sm">
          <b>{t("Bottleneck")}</b>: {sentence(prediction.bottleneck.sentence)}{" "}
          <Text component="span" inherit c="dimmed">
            {boundWords(prediction, plan.strategy, t)}
            {prediction.links_assumed && ` ${t("No link was measured, so communication is an assumption.")}`}
          </Text>
        </Text>
      )}
      {job.proposal != null && (
        <Alert title={t("A better plan is on its way")} color="lagoon">
          <Text size="sm">{sentence(job.proposal.sentence)}</Text>
          <Text size="sm" c="dimmed">
            {t("It saves {{gain}} over the steps that are left; moving costs {{cost}}.", {
              gain: stepTime(job.proposal.gain_s),
              cost: stepTime(job.proposal.move_cost_s),
            })}
          </Text>
        </Alert>
      )}
      <Busy plan={plan} measured={measured} />
      {plan.branches[0] !== undefined && (
        <Text size="xs" c="dimmed">
          {t("Predictions and measurements are of branch {{number}}.", { number: plan.branches[0].number })}
        </Text>
      )}
    </>
  );
}

/** Predicted and measured computing time of each machine in a step. */
function Busy({ plan, measured }: { plan: Plan; measured: Measured | null }) {
  const { t } = useTranslation();
  const step = plan.prediction?.step_s;
  const isKnown = measured !== null || plan.stages.some((stage) => stage.members.some((member) => member.busy_fraction != null));
  if (!isKnown) return null;
  return (
    <TextAlternative title={t("Computing time of each machine in a step")}>
      <Table className="stacking" verticalSpacing={6} horizontalSpacing="sm" mt="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Machine")}</Table.Th>
            <Table.Th>{t("Shard")}</Table.Th>
            <Table.Th className="numeric">{t("Predicted")}</Table.Th>
            <Table.Th className="numeric">{t("Stage, predicted")}</Table.Th>
            <Table.Th className="numeric">{t("Stage, measured")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {plan.stages.flatMap((stage, index) => {
            const timing = measured?.stages[index];
            return stage.members.map((member, seat) => (
              <Table.Tr key={member.contributor_id}>
                <Table.Td data-label={t("Machine")}>
                  <MachineLink id={member.contributor_id} name={member.name} />
                </Table.Td>
                <Table.Td data-label={t("Shard")}>
                  <span>
                    {t("stage {{stage}}", { stage: index + 1 })} · {layerRange(stage)}
                  </span>
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Predicted")}>
                  <span>{busyWords(member.busy_fraction, step)}</span>
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Stage, predicted")}>
                  <span>{seat > 0 || timing?.predicted_busy_s == null ? "–" : stepTime(timing.predicted_busy_s)}</span>
                </Table.Td>
                <Table.Td className="numeric" data-label={t("Stage, measured")}>
                  <span>{seat > 0 || timing === undefined ? "–" : stepTime(timing.measured_busy_s)}</span>
                </Table.Td>
              </Table.Tr>
            ));
          })}
        </Table.Tbody>
      </Table>
      <Text size="xs" c="dimmed" mt={4}>
        {t("For each stage, the time of its busiest member is measured.")}
      </Text>
    </TextAlternative>
  );
}

function busyWords(fraction: number | null | undefined, step: number | undefined): string {
  if (fraction == null) return "–";
  const share = `${Math.round(100 * fraction)}%`;
  return step === undefined ? share : `${stepTime(step * fraction)} (${share})`;
}

/** The known bound on the plan's quality. */
function boundWords({ gap, exact }: Prediction, strategy: string, t: TFunction): string {
  const found = strategy === "pinned" ? t("given by the job file") : t("the best that was found");
  const proof = exact ? t("proven best by the formula") : found;
  if (gap === null) return t("The plan is {{proof}}.", { proof });
  if (gap <= 0.0005) return t("No plan takes less time.");
  return t("The plan is {{percent}}% above the bound, {{proof}}.", { percent: (gap * 100).toFixed(1), proof });
}
