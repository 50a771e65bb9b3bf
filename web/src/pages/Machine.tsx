/** One machine: state, measurements, current work, history and contributions. */
import { SimpleGrid, Table, Text } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { getRouteApi } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { jobs, machine as machineQuery, machineWork, status } from "../api/queries";
import { isGone, type Machine as MachineView } from "../api/types";
import { Ago } from "../components/Ago";
import { sentence, Waiting } from "../components/Feedback";
import { Figure } from "../components/Figure";
import { AnchorLink } from "../components/links";
import { Page, Section } from "../components/frame/Page";
import { StateBadge } from "../components/StateBadge";
import { bytes, clock, count, dateAndTime, duration, si } from "../format";
import { Holder } from "../cluster/MachineTable";
import { machineState, partWords } from "../cluster/words";
import { differences } from "./admin/versions";
import { Busy } from "./machine/Busy";
import { Clear } from "./machine/Clear";
import { History } from "./machine/History";
import { idleReason } from "./machine/idle";
import classes from "./machine/Machine.module.css";
import { Live } from "./machine/Live";
import { Measure } from "./machine/Measure";
import { Devices, MeasuredLinks } from "./machine/Measurements";
import { RemoveMachine } from "./machine/RemoveMachine";
import { WorkHistory } from "./machine/WorkHistory";
import { flopsPerS, lentBytes } from "./machine";

const route = getRouteApi("/machines/$machineId");

export function Machine() {
  const { t } = useTranslation();
  const { machineId } = route.useParams();
  const { data: machine, error, refetch, dataUpdatedAt } = useQuery(machineQuery(machineId));
  if (machine === undefined) {
    return (
      <Page title={machineId}>
        <Waiting error={error} refetch={refetch} />
      </Page>
    );
  }
  return (
    <Page title={machine.name} beside={<StateBadge state={machineState(machine.state, machine.held != null)} />} actions={<Leave machine={machine} />}>
      <AnchorLink to="/" size="sm">
        {t("Back to the machines")}
      </AnchorLink>
      <div>
        <Text>{sentence(machine.reason)}</Text>
        <LastSeen machine={machine} askedAt={dataUpdatedAt} />
      </div>
      <Figures machine={machine} />
      {!isGone(machine) && (
        <Section title={t("Utilization")}>
          <Live machine={machine} />
        </Section>
      )}
      <Section title={t("Contributions")}>
        <WorkHistory machineId={machine.id} />
      </Section>
      <Section title={t("Current work")}>
        <Holds machine={machine} />
      </Section>
      <Section title={t("How busy it is")}>
        <Busy machine={machine} />
      </Section>
      <Section title={t("Measurements")} actions={<Measure machine={machine} />}>
        <Devices machine={machine} />
        <MeasuredLinks machine={machine} />
      </Section>
      <Section title={t("Lent resources")}>
        <Facts machine={machine} />
      </Section>
      <Section title={t("History")}>
        <History machineId={machine.id} />
      </Section>
      <Text size="sm" c="dimmed">
        {machine.id} · {t("joined {{when}}", { when: dateAndTime(machine.joined_at) })}
      </Text>
    </Page>
  );
}

function Leave({ machine }: { machine: MachineView }) {
  const { t } = useTranslation();
  if (isGone(machine) || machine.removed_at !== null) return null;
  return (
    <>
      {machine.quarantined_for !== null && <Clear machine={machine} />}
      <RemoveMachine machine={machine}>
        {machine.held == null
          ? t("It leaves at once, and can come back only with a new invite.")
          : t("It hands over what it holds, then leaves, and can come back only with a new invite.")}
      </RemoveMachine>
    </>
  );
}

/** The time of the last heartbeat. Heartbeats are not events, so the time of the request is shown, too. */
function LastSeen({ machine, askedAt }: { machine: MachineView; askedAt: number }) {
  const { t } = useTranslation();
  return (
    <Text size="sm" c="dimmed">
      {isGone(machine) ? (
        <>
          {t("Last seen")} <Ago moment={machine.last_seen_at} />.
        </>
      ) : (
        <>
          {t("Last sign of life at {{time}}, as the server knew", { time: clock(machine.last_seen_at) })}{" "}
          <Ago moment={new Date(askedAt).toISOString()} />. {t("If it becomes unresponsive, this page says so.")}
        </>
      )}
    </Text>
  );
}

function Figures({ machine }: { machine: MachineView }) {
  const { t } = useTranslation();
  const { data: work } = useQuery(machineWork(machine.id));
  const used = machine.held?.memory_bytes;
  const speed = flopsPerS(machine);
  return (
    <SimpleGrid cols={{ base: 2, sm: 4 }} spacing="sm">
      <Figure label={t("Time at work")} value={work === undefined ? "–" : duration(work.seconds)} />
      <Figure label={t("Microbatches computed")} value={work === undefined ? "–" : count(work.microbatches)} />
      <Figure label={t("Speed (float32)")} value={speed > 0 ? si(speed, "FLOP/s") : "–"} />
      <Figure
        label={t("Memory planned / lent")}
        value={`${used == null ? "–" : bytes(used)} / ${bytes(lentBytes(machine))}`}
        title={t("Memory that the plan needs, of all that its owner lends")}
      />
    </SimpleGrid>
  );
}

/** The reason why a free machine has no work: the planner's reason of a running job, or that no job runs. */
function WhyIdle({ machineId }: { machineId: string }) {
  const { t } = useTranslation();
  const { data } = useInfiniteQuery(jobs({ state: "running" }));
  const why = idleReason(machineId, data?.pages.flatMap((page) => page.jobs) ?? []);
  if (why === null) {
    return (
      <Text size="sm" c="dimmed">
        {t("Nothing: it is free for the next job.")}
      </Text>
    );
  }
  return (
    <Text size="sm">
      {t("This machine is not needed now: {{reason}}", { reason: sentence(why.reason) })}{" "}
      <AnchorLink to="/jobs/$jobId" params={{ jobId: why.job.id }} size="sm">
        {why.job.name}
      </AnchorLink>
    </Text>
  );
}

function Holds({ machine }: { machine: MachineView }) {
  const { t } = useTranslation();
  const { held } = machine;
  if (held == null) {
    if (machine.state === "ready") return <WhyIdle machineId={machine.id} />;
    return (
      <Text size="sm" c="dimmed">
        {t("Nothing.")}
      </Text>
    );
  }
  const part = partWords(t, held);
  return (
    <div>
      <Text size="sm" component="div">
        <span className={classes.holder}>
          {held.job_id != null ? t("Job") : t("Deployment")} <Holder held={held} isInText />
        </span>
        {part === null ? t("no plan yet") : part}
      </Text>
      {part !== null && held.start != null && held.stop != null && held.num_layers != null && (
        <div className={classes.model} role="img" aria-label={part}>
          <div
            className={classes.part}
            style={{
              marginInlineStart: `${(100 * held.start) / held.num_layers}%`,
              width: `${Math.max(1, (100 * (held.stop - held.start)) / held.num_layers)}%`,
            }}
          />
        </div>
      )}
      {held.memory_bytes != null && (
        <Text size="sm" c="dimmed">
          {held.microbatches != null && held.job_id != null
            ? t("{{own}} of {{all}} microbatches of each step, {{memory}} of memory", {
                own: held.microbatches,
                all: held.of_microbatches,
                memory: bytes(held.memory_bytes),
              })
            : t("{{memory}} of memory", { memory: bytes(held.memory_bytes) })}
        </Text>
      )}
    </div>
  );
}

/** The lent devices: their kind, their number if there are several, and the UUIDs of GPUs. */
function worksOn(limits: MachineView["limits"]): string {
  const count = Number(limits.devices ?? 1);
  const kind = count > 1 ? `${count} × ${String(limits.device)}` : limits.device;
  return [kind, ...((limits.gpus ?? []) as string[])].filter(Boolean).join(" · ") || "–";
}

function Facts({ machine }: { machine: MachineView }) {
  const { t } = useTranslation();
  const { limits, versions } = machine;
  const { data: server } = useQuery(status);
  const differing = server === undefined ? [] : differences(versions, server.versions);
  const labels = Object.entries((limits.labels ?? {}) as Record<string, string>)
    .map(([key, value]) => `${key}=${value}`)
    .sort()
    .join(", ");
  const facts: [string, string][] = [
    [t("Owner"), machine.owner ?? t("not said")],
    [t("Host"), [machine.host, machine.address].filter(Boolean).join(" · ")],
    [t("Memory"), limits.memory_bytes == null ? "–" : bytes(Number(limits.memory_bytes))],
    [t("CPU threads"), limits.cpu_threads == null ? "–" : String(limits.cpu_threads)],
    ...[
      [t("Upload limit"), limits.upload_bytes_per_s] as const,
      [t("Download limit"), limits.download_bytes_per_s] as const,
    ].flatMap(([name, rate]): [string, string][] => (typeof rate === "number" ? [[name, si(rate, "B/s")]] : [])),
    ...(labels === "" ? [] : [[t("Labels"), labels] as [string, string]]),
    [t("Works on"), worksOn(limits)],
    ...differing.map(({ name, given, wanted }): [string, string] => [
      name,
      t("{{given}}, the server has {{wanted}}", { given: given ?? t("unknown"), wanted }),
    ]),
  ];
  return (
    <Table className={classes.plain} variant="vertical" aria-label={t("Lent resources")}>
      <Table.Tbody>
        {facts.map(([name, value]) => (
          <Table.Tr key={name}>
            <Table.Th>{name}</Table.Th>
            <Table.Td>{value}</Table.Td>
          </Table.Tr>
        ))}
      </Table.Tbody>
    </Table>
  );
}
