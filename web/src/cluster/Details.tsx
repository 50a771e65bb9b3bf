/** A description of the hovered machine. Its space is reserved, so that nothing moves when it appears. */
import { Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { MachineSummary } from "../api/types";
import { StateBadge } from "../components/StateBadge";
import { sentence } from "../components/Feedback";
import { AtWork } from "./AtWork";
import { qualityOf } from "./layout";
import classes from "./ClusterMap.module.css";
import type { Utilizations } from "./useUtilization";
import { linkWords, machineState, memoryWords, partWords, qualityWords, speedWords, usedWords } from "./words";

interface Props {
  /** All machines; their work is shown while no machine is hovered. */
  machines: readonly MachineSummary[];
  machine: MachineSummary | undefined;
  /** Present utilization of the machines that report it. */
  utilizations: Utilizations;
  hasBubbles: boolean;
}

export function Details({ machines, machine, utilizations, hasBubbles }: Props) {
  const { t } = useTranslation();
  if (machine === undefined) {
    return (
      <div className={classes.details}>
        <AtWork machines={machines} used={utilizations} />
        <Text size="xs" c="dimmed" className={hasBubbles ? undefined : classes.pointing}>
          {hasBubbles ? t("Open an island to see its machines.") : t("Point at a machine, or reach it with the Tab key; a click opens its page.")}
        </Text>
      </div>
    );
  }
  const { held } = machine;
  const used = utilizations[machine.id];
  const facts: [string, string][] = [
    [t("Owner"), machine.owner ?? t("not said")],
    [t("Device"), machine.device ?? machine.host],
    [t("Speed (float32)"), speedWords(machine)],
    [held?.memory_bytes == null ? t("Memory lent") : t("Memory planned"), memoryWords(t, machine)],
    [
      t("Link to the server"),
      machine.head_bytes_per_s === null
        ? "–"
        : `${linkWords(machine.head_latency_s, machine.head_bytes_per_s)} (${qualityWords(t, qualityOf(machine.head_bytes_per_s))})`,
    ],
    [t("In use"), used === undefined ? "–" : usedWords(t, used)],
    [t("Works for"), held === null ? "–" : [held.name, partWords(t, held)].filter(Boolean).join(" · ")],
  ];
  return (
    <div className={classes.details}>
      <div className={classes.who}>
        <Text size="sm" fw={600}>
          {machine.name}
        </Text>
        <StateBadge state={machineState(machine.state, machine.held !== null)} />
        <Text size="xs" c="dimmed">
          {sentence(machine.reason)}
        </Text>
      </div>
      <dl className={classes.facts}>
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd title={value}>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}
