/** Performance of one replica, beside its plan's prediction. */
import { Progress, Table, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { ReplicaStatus } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { MachineLink } from "../../components/MachineLink";
import { StateBadge } from "../../components/StateBadge";
import { bytes, count, difference, stepTime } from "../../format";
import { layerRange } from "../../placement/layout";
import classes from "./Replica.module.css";

interface Props {
  status: ReplicaStatus;
  /** Its number, if there are several. */
  number?: number;
}

export function Replica({ status, number }: Props) {
  const { t } = useTranslation();
  const bottleneck = status.prediction?.bottleneck.sentence;
  return (
    <div className={classes.replica}>
      {number !== undefined && (
        <div className={classes.title}>
          <Text fw={600} size="sm">
            {t("Replica {{number}}", { number })}
          </Text>
          <StateBadge state={status.state} />
          <Text size="sm" c="dimmed">
            {sentence(status.reason)}
          </Text>
        </div>
      )}
      <Times status={status} />
      <Use status={status} />
      {status.stages.length > 0 && <Stages status={status} />}
      {bottleneck !== undefined && (
        <Text size="sm" c="dimmed">
          {t("Slowest part:")} {sentence(bottleneck)}
        </Text>
      )}
      {status.recoveries > 0 && (
        <Text size="sm">
          {status.last_gap_s == null
            ? t("Interrupted {{count}} times", { count: status.recoveries })
            : t("Interrupted {{count}} times, the last time for {{time}}", {
                count: status.recoveries,
                time: stepTime(status.last_gap_s),
              })}
          .
        </Text>
      )}
    </div>
  );
}

function Times({ status }: { status: ReplicaStatus }) {
  const { t } = useTranslation();
  const rows = [
    { label: t("Time to first token"), ...status.first_token },
    { label: t("From token to token"), ...status.next_token },
  ];
  return (
    <Table className={classes.times} verticalSpacing={6}>
      <Table.Thead>
        <Table.Tr>
          <Table.Th>{t("Figure")}</Table.Th>
          <Table.Th className="numeric">{t("measured")}</Table.Th>
          <Table.Th className="numeric">{t("predicted")}</Table.Th>
        </Table.Tr>
      </Table.Thead>
      <Table.Tbody>
        {rows.map(({ label, p50_s, p95_s, predicted_s }) => (
          <Table.Tr key={label}>
            <Table.Th scope="row">{label}</Table.Th>
            <Table.Td className="numeric">
              {p50_s == null ? "–" : stepTime(p50_s)}
              {p50_s != null && predicted_s != null && <Aside>{difference(p50_s, predicted_s)}</Aside>}
              {p95_s != null && <Aside>{t("95%: {{time}}", { time: stepTime(p95_s) })}</Aside>}
            </Table.Td>
            <Table.Td className="numeric">{predicted_s == null ? "–" : stepTime(predicted_s)}</Table.Td>
          </Table.Tr>
        ))}
        <Table.Tr>
          <Table.Th scope="row">{t("Tokens a second")}</Table.Th>
          <Table.Td className="numeric">{rate(status.tokens_per_s)}</Table.Td>
          <Table.Td className="numeric">
            {status.predicted_tokens_per_s == null ? (
              "–"
            ) : (
              <>
                {rate(status.predicted_tokens_per_s)}
                <Aside>{t("with all sequences in flight")}</Aside>
              </>
            )}
          </Table.Td>
        </Table.Tr>
      </Table.Tbody>
    </Table>
  );
}

function Aside({ children }: { children: React.ReactNode }) {
  return <span className={classes.aside}>{children}</span>;
}

function Use({ status: { queue } }: { status: ReplicaStatus }) {
  const { t } = useTranslation();
  const share = queue.kv_tokens === 0 ? 0 : queue.kv_tokens_used / queue.kv_tokens;
  const kept = queue.kv_tokens === 0 ? 0 : queue.kv_tokens_cached / queue.kv_tokens;
  return (
    <div className={classes.use}>
      <Text size="sm">
        {t("{{running}} running, {{queued}} queued", { running: queue.running, queued: queue.queued })}
        {queue.batch_size != null && ` · ${t("{{size}} in a turn", { size: queue.batch_size.toFixed(1) })}`}
      </Text>
      {queue.kv_tokens > 0 && (
        <div className={classes.cache}>
          <Text size="sm">
            {t("KV cache: {{used}} of {{all}} tokens in use, {{kept}} kept", {
              used: percent(share),
              all: count(queue.kv_tokens),
              kept: percent(kept),
            })}
          </Text>
          <Progress value={100 * share} size="sm" aria-label={t("KV cache in use")} />
        </div>
      )}
    </div>
  );
}

function Stages({ status }: { status: ReplicaStatus }) {
  const { t } = useTranslation();
  return (
    <div className="scroll" tabIndex={0} role="group" aria-label={t("Stages")}>
      <Table className="stacking" verticalSpacing={6}>
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Machine")}</Table.Th>
            <Table.Th>{t("Layers")}</Table.Th>
            <Table.Th>{t("Health")}</Table.Th>
            <Table.Th>{t("Busy")}</Table.Th>
            <Table.Th className="numeric">{t("Memory")}</Table.Th>
            <Table.Th className="numeric">{t("of it caches")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {status.stages.map((stage) => (
            <Table.Tr key={stage.contributor_id}>
              <Table.Td data-label={t("Machine")}>
                <MachineLink id={stage.contributor_id} name={stage.name} />
              </Table.Td>
              <Table.Td data-label={t("Layers")}>{layerRange(stage)}</Table.Td>
              <Table.Td data-label={t("Health")}>
                <span className={classes.health} data-alive={stage.is_alive}>
                  {stage.is_alive ? t("alive") : t("unresponsive")}
                </span>
              </Table.Td>
              <Table.Td data-label={t("Busy")} miw={150}>
                <Progress
                  className="wide"
                  value={100 * (stage.busy_fraction ?? 0)}
                  size="sm"
                  aria-label={t("{{name}}: busy", { name: stage.name })}
                />
                <Text size="xs" c="dimmed">
                  {stage.busy_fraction == null ? "–" : percent(stage.busy_fraction)}
                  {stage.predicted_busy_fraction != null &&
                    ` · ${t("predicted {{share}}", { share: percent(stage.predicted_busy_fraction) })}`}
                </Text>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Memory")}>{stage.resident_bytes ? bytes(stage.resident_bytes) : "–"}</Table.Td>
              <Table.Td className="numeric" data-label={t("of it caches")}>{stage.cache_bytes ? bytes(stage.cache_bytes) : "–"}</Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

function percent(share: number): string {
  return `${Math.round(100 * share)}%`;
}

function rate(value: number): string {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}
