import { Text } from "@mantine/core";
import type { TFunction } from "i18next";
import { useTranslation } from "react-i18next";

import type { Plan } from "../api/types";
import { bytes, si, stepTime } from "../format";
import { layerRange, ranges, type Block } from "./layout";
import classes from "./Placement.module.css";

/** The exact numbers of the hovered machine. */
export function Details({ plan, block }: { plan: Plan; block: Block | undefined }) {
  const { t } = useTranslation();
  const member = block && plan.stages[block.stage]?.members[block.seat];
  if (block === undefined || member === undefined) {
    return (
      <div className={classes.details}>
        <Text size="sm" c="dimmed">
          {t("Point at a machine, or go through them with the arrow keys, for its figures.")}
        </Text>
      </div>
    );
  }
  return (
    <div className={classes.details} data-hue={block.stage % 6} data-lit>
      <Text size="sm">
        <b>{member.name}</b>: {figuresOf(plan, block, t).join(", ")}
      </Text>
      <Text size="sm" c="dimmed">
        {member.reason}
      </Text>
    </div>
  );
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
        ? t("computes {{share}} % of a step", { share })
        : t("computes {{share}} % of a step ({{time}})", { share, time: stepTime(step * member.busy_fraction) }),
    );
  }
  return figures;
}
