import { Text } from "@mantine/core";
import type { TFunction } from "i18next";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import type { Plan } from "../api/types";
import { sentence } from "../components/Feedback";
import { bytes, si, stepTime } from "../format";
import { layerRange, ranges, type Block } from "./layout";
import type { Work } from "./live";
import classes from "./Placement.module.css";

interface Props {
  plan: Plan;
  block: Block | undefined;
  work: Work | undefined;
  /** Shown instead of the hint while no machine is hovered. */
  note: ReactNode;
}

/** The exact numbers of the hovered machine. */
export function Details({ plan, block, work, note }: Props) {
  const { t } = useTranslation();
  const member = block && plan.stages[block.stage]?.members[block.seat];
  if (block === undefined || member === undefined) {
    return (
      <div className={classes.details}>
        {note || (
          <Text size="sm" c="dimmed">
            {t("Point at a machine, or go through them with the arrow keys, for its figures.")}
          </Text>
        )}
      </div>
    );
  }
  return (
    <div className={classes.details} data-hue={block.stage % 6} data-lit>
      <Text size="sm">
        <b>{member.name}</b>: {[...workWords(work, t), ...figuresOf(plan, block, t)].join(", ")}
      </Text>
      <Text size="sm" c="dimmed">
        {sentence(member.reason)}
      </Text>
    </div>
  );
}

/** The measured work of one machine, as separate texts. */
export function workWords(work: Work | undefined, t: TFunction): string[] {
  if (work === undefined) return [];
  const { computing, sentBytesPerS, receivedBytesPerS } = work;
  return [
    ...(computing === null ? [] : [t("measured: computes {{share}}% of a step", { share: Math.round(100 * computing) })]),
    ...(sentBytesPerS === null || receivedBytesPerS === null
      ? []
      : [t("sends {{sent}}, receives {{received}}", { sent: si(sentBytesPerS, "B/s"), received: si(receivedBytesPerS, "B/s") })]),
  ];
}

/** The layers, memory and computing time of one machine, as separate texts. */
export function figuresOf(plan: Plan, { stage: place, seat }: Block, t: TFunction): string[] {
  const stage = plan.stages[place];
  const member = stage?.members[seat];
  if (stage === undefined || member === undefined) return [];
  const lent = member.lent_bytes;
  const figures = [
    t("stage {{stage}}", { stage: place + 1 }),
    stage.stop - stage.start === 1
      ? t("layer {{range}} of {{all}}", { range: layerRange(stage), all: plan.num_layers })
      : t("layers {{range}} of {{all}}", { range: layerRange(stage), all: plan.num_layers }),
    t("{{number}} parameters", { number: si(stage.parameters, "") }),
    t("microbatches {{range}} ({{own}} of {{all}})", {
      range: ranges(member.microbatches) || "–",
      own: member.microbatches.length,
      all: plan.microbatches,
    }),
    lent == null
      ? t("needs {{memory}}", { memory: bytes(member.memory_bytes) })
      : t("needs {{memory}} of {{lent}} lent", { memory: bytes(member.memory_bytes), lent: bytes(lent) }),
  ];
  if (member.busy_fraction != null) {
    const share = Math.round(100 * member.busy_fraction);
    const step = plan.prediction?.step_s;
    figures.push(
      step === undefined
        ? t("computes {{share}}% of a step", { share })
        : t("computes {{share}}% of a step ({{time}})", { share, time: stepTime(step * member.busy_fraction) }),
    );
  }
  return figures;
}
