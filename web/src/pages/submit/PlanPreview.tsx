/** Preview of the plan that the job would get on the machines that are ready now. */
import { Group, Loader, SimpleGrid, Stack, Text } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { Trans, useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { cluster } from "../../api/queries";
import type { PlanReport, ClusterView } from "../../api/types";
import { Failure, sentence } from "../../components/Feedback";
import { Figure } from "../../components/Figure";
import { Section } from "../../components/frame/Page";
import { bytes, duration, si, stepTime } from "../../format";
import { Placement } from "../../placement/Placement";
import type { Draft } from "./draft";
import classes from "./form/Form.module.css";

const SETTLING_MS = 900;

const readyIds = ({ machines }: ClusterView) => machines.filter((one) => one.state === "ready").map((one) => one.id);

interface Props {
  draft: Draft;
  kind: string;
  /** Whether the server would accept the current text. */
  isGood: boolean;
}

export function PlanPreview({ draft, kind, isGood }: Props) {
  const { t } = useTranslation();
  const ready = useQuery({ ...cluster, select: readyIds }).data;
  const request = question(draft, kind);
  // A plan also depends on the machines, so it is requested again when they change.
  const machines = ready?.join() ?? "";
  const [settled] = useDebouncedValue(isGood && request !== undefined ? JSON.stringify(request) : "", SETTLING_MS);
  const wanted = settled !== "" && machines !== "";
  const { data, error, isFetching, isPlaceholderData } = useQuery({
    queryKey: ["plan", settled, machines],
    // An aborted request also ends the planning on the server.
    queryFn: ({ signal }) => body(api.POST("/api/v1/plans", { signal, body: JSON.parse(settled) })),
    enabled: wanted,
    placeholderData: keepPreviousData,
    retry: false,
    gcTime: 300_000,
  });

  return (
    <Section
      title={t("Plan")}
      actions={isFetching && <Loader size="xs" role="status" aria-label={t("The plan is being made")} />}
    >
      {request === undefined ? (
        <Text size="sm" c="dimmed">
          {kind === "sparse"
            ? t("Its machines are chosen when it starts: those with most memory, one for each worker and two for each range of weights.")
            : kind === "sweep"
              ? t("Each trial gets a plan of its own when it starts.")
              : t("Its machines are chosen when it starts: a running deployment answers, or a new one is started.")}
        </Text>
      ) : ready?.length === 0 ? (
        <Text size="sm" c="dimmed">
          <Trans
            i18nKey="No machine is ready, so the job would wait in the queue. <invite>Invite one</invite> to see the plan."
            components={{ invite: <Link to="/invites" className={classes.link!} /> }}
          />
        </Text>
      ) : error !== null && !isFetching ? (
        <Failure error={error} />
      ) : data !== undefined && wanted ? (
        <div data-stale={isPlaceholderData} aria-busy={isFetching}>
          <Report report={data} steps={kind === "train" ? stepsOf(draft) : undefined} />
        </div>
      ) : (
        <Text size="sm" c="dimmed">
          {isFetching
            ? t("The planner places the model on the machines that are ready.")
            : t("The plan is made as soon as the job is complete. This does not submit the job.")}
        </Text>
      )}
    </Section>
  );
}

function Report({ report, steps }: { report: PlanReport; steps: number | undefined }) {
  const { t } = useTranslation();
  const { plan, serving } = report;
  const prediction = serving === null || serving === undefined ? plan.prediction : undefined;
  const shown = serving?.plan ?? plan;
  const rounds = prediction === undefined ? undefined : (report.rounds ?? undefined);
  const stages = [...shown.stages, ...(shown.branches ?? []).flatMap((branch) => branch.stages)];
  const members = new Set(stages.flatMap((stage) => stage.members.map((member) => member.contributor_id)));
  const roundTime = rounds?.round_s ?? undefined;
  const total = roundTime === undefined ? prediction?.step_s : roundTime / rounds!.every;
  const bottleneck = serving?.bottleneck ?? prediction?.bottleneck;
  return (
    <Stack gap="md">
      <SimpleGrid cols={2} spacing="xs">
        {prediction && <Figure label={t("One step")} value={stepTime(prediction.step_s)} />}
        {roundTime !== undefined && <Figure label={t("One round")} value={stepTime(roundTime)} />}
        {total !== undefined && steps !== undefined && (
          <Figure label={t("All {{steps}} steps", { steps })} value={duration(total * steps)} />
        )}
        {prediction && rounds === undefined && <Figure label={t("Tokens")} value={si(prediction.tokens_per_s, "/s")} />}
        {typeof rounds?.samples_per_s === "number" && <Figure label={t("Samples")} value={si(rounds.samples_per_s, "/s")} />}
        {rounds && (
          <Figure label={t("Sent, received")} value={`${bytes(rounds.contribution_bytes)}, ${bytes(rounds.update_bytes)}`} />
        )}
        {serving && <Figure label={t("First token")} value={stepTime(serving.first_token_s)} />}
        {serving && <Figure label={t("Each token after it")} value={stepTime(serving.next_token_s)} />}
        <Figure label={t("Machines in, out")} value={`${members.size}, ${shown.idle.length}`} />
      </SimpleGrid>
      {report.choice && (
        <Text size="sm">
          {report.choice.every === null || report.choice.every === undefined
            ? t("Chosen: lockstep, the gradients of all machines in each step")
            : t("Chosen: rounds of {{steps}} steps", { steps: report.choice.every })}
        </Text>
      )}
      {bottleneck && (
        <Text size="sm">
          <Text component="span" fw={500}>
            {t("Bottleneck")}:
          </Text>{" "}
          {sentence(bottleneck.sentence)}
        </Text>
      )}
      {rounds && <Rounds rounds={rounds} />}
      {prediction?.links_assumed && (
        <Text size="xs" c="dimmed">
          {t("No link between the machines was measured; their speed is an assumption.")}
        </Text>
      )}
      <Placement plan={shown} />
      <Group gap={0}>
        <Text size="xs" c="dimmed">
          {t("Predicted for the machines that are ready now; the job gets its plan when it starts.")}
        </Text>
      </Group>
    </Stack>
  );
}

/** The islands with their branches, and the comparison with training in lockstep. */
function Rounds({ rounds }: { rounds: NonNullable<PlanReport["rounds"]> }) {
  const { t } = useTranslation();
  const ratio = (2 * rounds.uncompressed_bytes) / Math.max(1, rounds.contribution_bytes + rounds.update_bytes);
  return (
    <Stack gap={4}>
      {ratio >= 1.05 && (
        <Text size="sm">{t("Each branch and round; {{ratio}} times less than float32.", { ratio: Number(ratio.toPrecision(3)) })}</Text>
      )}
      {rounds.comparison.map((one) => (
        <Text key={one} size="sm">
          {sentence(one)}
        </Text>
      ))}
      {rounds.islands.map((island) => (
        <Text key={island.machines.join()} size="sm" c="dimmed">
          {t("{{machines}}: branches {{branches}}", { machines: island.machines.join(", "), branches: island.branches.join(", ") })}
        </Text>
      ))}
    </Stack>
  );
}

function stepsOf(draft: Draft): number | undefined {
  const steps = draft.get(["training", "steps"]) ?? 100;
  return typeof steps === "number" ? steps : undefined;
}

/** The request to the planner; undefined if there is nothing to plan before the batch starts. */
function question(draft: Draft, kind: string): object | undefined {
  if (kind === "train" && draft.value !== null) {
    // A plan depends neither on the name nor on the data.
    return { job: { ...draft.value, name: "preview" } };
  }
  const path = draft.get(["model", "path"]);
  if (kind !== "serve" || typeof path !== "string") return undefined;
  const given = (key: string) => (draft.get([key]) === undefined ? {} : { [key]: draft.get([key]) });
  return {
    job: { kind: "train", name: "preview", model: { path }, data: { files: ["/not/looked/at.txt"] } },
    serving: {
      ...given("objective"),
      ...given("prompt_tokens"),
      ...given("new_tokens"),
      ...given("first_token_limit_s"),
      ...given("next_token_limit_s"),
      ...(typeof draft.get(["max_concurrent"]) === "number" && { concurrent: draft.get(["max_concurrent"]) }),
    },
  };
}
