import { Table, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import { isGone, type Alert, type Contributor, type Versions } from "../../api/types";
import { machineState } from "../../cluster/words";
import { MachineLink } from "../../components/MachineLink";
import { AnchorLink } from "../../components/links";
import { StateBadge } from "../../components/StateBadge";
import { ago, count, duration } from "../../format";
import { useNow } from "../../useNow";
import { RemoveMachine } from "../machine/RemoveMachine";
import classes from "./Machines.module.css";
import { differences, type Difference } from "./versions";

/** Maximum number of machines in the list; those that need attention come first. */
const MOST = 50;

interface Props {
  machines: readonly Contributor[];
  alerts: readonly Alert[];
  /** Versions of the server. */
  versions: Versions | undefined;
}

/** Machines that are present or were lost recently, their work, and their heartbeats. */
export function Machines({ machines, alerts, versions }: Props) {
  const { t } = useTranslation();
  const now = useNow();
  const shown = machines.filter((machine) => machine.state !== "left");
  const differing = new Map(
    shown.map((machine) => [machine.id, versions === undefined ? [] : differences(machine.versions, versions)] as const),
  );
  const alerting = new Set(alerts.flatMap((alert) => (alert.contributor_id == null ? [] : [alert.contributor_id])));
  const rank = (machine: Contributor) => (isGone(machine) || alerting.has(machine.id) || differing.get(machine.id)!.length > 0 ? 0 : 1);
  const listed = shown.length > MOST ? [...shown].sort((one, other) => rank(one) - rank(other)).slice(0, MOST) : shown;
  const hasDifferences = [...differing.values()].some((found) => found.length > 0);
  if (shown.length === 0) {
    return (
      <Text size="sm" c="dimmed">
        {t("No machine is here.")}
      </Text>
    );
  }
  return (
    <div className="scroll">
      <Table className="stacking" verticalSpacing="xs">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Machine")}</Table.Th>
            <Table.Th>{t("State")}</Table.Th>
            {hasDifferences && <Table.Th>{t("Versions")}</Table.Th>}
            <Table.Th>{t("Signs of life")}</Table.Th>
            <Table.Th className="numeric">{t("Actions")}</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {listed.map((machine) => (
            <Table.Tr key={machine.id}>
              <Table.Td data-label={t("Machine")}>
                <MachineLink id={machine.id} name={machine.name} fw={600} />
                <Text size="xs" c="dimmed">
                  {machine.host}
                </Text>
              </Table.Td>
              <Table.Td data-label={t("State")}>
                <StateBadge state={machineState(machine.state, machine.job_id != null || machine.deployment_id != null)} />
              </Table.Td>
              {hasDifferences && (
                <Table.Td data-label={t("Versions")}>
                  <Differences found={differing.get(machine.id)!} />
                </Table.Td>
              )}
              <Table.Td data-label={t("Signs of life")}>
                <Text size="sm">
                  <Heartbeat machine={machine} alerts={alerts} now={now} />
                </Text>
              </Table.Td>
              <Table.Td className="numeric" data-label={t("Actions")}>
                {!isGone(machine) && <Leave machine={machine} />}
              </Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
      {listed.length < shown.length && (
        <AnchorLink to="/" search={{ view: "table", gone: true }} size="sm">
          {t("{{shown}} of {{all}} machines are listed, first those with an alert or other versions; the table has all", { shown: count(listed.length), all: count(shown.length) })}
        </AnchorLink>
      )}
    </div>
  );
}

function Differences({ found }: { found: readonly Difference[] }) {
  const { t } = useTranslation();
  if (found.length === 0) return null;
  return (
    <ul className={classes.differences}>
      {found.map(({ name, given, wanted }) => (
        <li key={name}>
          {t("{{name}} {{given}}, the server has {{wanted}}", { name, given: given ?? t("unknown"), wanted })}
        </li>
      ))}
    </ul>
  );
}

/** Agents send a heartbeat every two seconds without an event; only unresponsive machines cause events. */
function Heartbeat({ machine, alerts, now }: { machine: Contributor; alerts: readonly Alert[]; now: number }) {
  const { t } = useTranslation();
  if (machine.state === "joining") return "–";
  if (isGone(machine)) return t("last seen {{when}}", { when: ago(machine.last_seen_at, now) });
  const unresponsive = alerts.find((alert) => alert.kind === "machine-unresponsive" && alert.contributor_id === machine.id);
  if (unresponsive?.since == null) return t("heard");
  return t("unresponsive for {{time}}", { time: duration(Math.round((now - Date.parse(unresponsive.since)) / 1000)) });
}

function Leave({ machine }: { machine: Contributor }) {
  const { t } = useTranslation();
  return machine.removed_at !== null ? (
    <Text size="sm" c="dimmed">
      {t("draining")}
    </Text>
  ) : (
    <RemoveMachine machine={machine} label={t("Remove {{name}}", { name: machine.name })}>
      {t("It hands its work over, then leaves, and can come back only with a new invite.")}
    </RemoveMachine>
  );
}
