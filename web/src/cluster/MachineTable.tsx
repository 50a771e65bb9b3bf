/** The machines as a table: the map's content, for reading, sorting and searching. */
import { Button, Group, NativeSelect, Table, Text, UnstyledButton } from "@mantine/core";
import { useNavigate } from "@tanstack/react-router";
import { memo, useMemo } from "react";
import { useTranslation } from "react-i18next";

import { isGone, type MachineSummary, type Held, type UtilizationSample } from "../api/types";
import { Ago } from "../components/Ago";
import { Empty } from "../components/Feedback";
import { MachineLink } from "../components/MachineLink";
import { AnchorLink } from "../components/links";
import { StateBadge } from "../components/StateBadge";
import { count } from "../format";
import { translated } from "../i18n/texts";
import { qualityOf } from "./layout";
import classes from "./MachineTable.module.css";
import { clusterSearch, type ClusterSearch, type Sort } from "./search";
import { sorted } from "./sorting";
import { useUtilization } from "./useUtilization";
import { busyOf, linkWords, machineState, memoryWords, partWords, qualityWords, shareText, speedWords, usedWords } from "./words";

/** Number of rows drawn at one time. */
const PER_PAGE = 50;

interface Props {
  machines: readonly MachineSummary[];
  /** Number of each machine's island. */
  islands: ReadonlyMap<string, number>;
  search: ClusterSearch;
}

export function MachineTable({ machines, islands, search }: Props) {
  const { t } = useTranslation();
  const navigate = useNavigate({ from: "/" });
  const { sort = "joined", desc = false } = search;
  const used = useUtilization();
  // Rows that are sorted by another column keep their positions when machines report.
  const all = useMemo(() => sorted(machines, sort, desc, islands, used), [machines, sort, desc, islands, sort === "use" && used]);
  const pages = Math.max(1, Math.ceil(all.length / PER_PAGE));
  const page = Math.min(search.page ?? 1, pages);
  const shown = all.slice((page - 1) * PER_PAGE, page * PER_PAGE);
  const columns: { sort: Sort; label: string; isNumeric?: boolean }[] = [
    { sort: "name", label: t("Machine") },
    { sort: "state", label: t("State") },
    { sort: "work", label: t("Work") },
    { sort: "island", label: t("Island") },
    { sort: "speed", label: t("Speed (float32)"), isNumeric: true },
    { sort: "use", label: t("In use"), isNumeric: true },
    { sort: "memory", label: t("Memory"), isNumeric: true },
    { sort: "link", label: t("Link to the server"), isNumeric: true },
  ];
  const order = (next: Sort, isDescending: boolean) =>
    void navigate({
      search: (old) => clusterSearch({ ...old, page: undefined, sort: next, desc: isDescending }),
      replace: true,
    });
  const turn = (to: number) => void navigate({ search: (old) => clusterSearch({ ...old, page: to }), replace: true });
  if (all.length === 0) {
    return (
      <Empty title={t("No machine fits")}>
        <Text>{t("The search looks at names, owners, devices, states and work.")}</Text>
      </Empty>
    );
  }
  return (
    <>
      <Group gap="xs" hiddenFrom="sm" wrap="nowrap" align="end">
        <NativeSelect
          label={t("Sort by")}
          value={sort}
          onChange={(event) => order(event.currentTarget.value as Sort, desc)}
          data={[{ value: "joined", label: t("Joined") }, ...columns.map((column) => ({ value: column.sort, label: column.label }))]}
        />
        <Button variant="default" onClick={() => order(sort, !desc)} aria-pressed={desc}>
          {desc ? t("Largest first") : t("Smallest first")}
        </Button>
      </Group>
      <div className="card scroll">
        <Table className="stacking" verticalSpacing="sm" horizontalSpacing="md" aria-label={t("Machines")}>
          <Table.Thead>
            <Table.Tr>
              {columns.map((column) => {
                const isSorted = column.sort === sort;
                return (
                  <Table.Th
                    key={column.sort}
                    className={column.isNumeric ? "numeric" : undefined}
                    aria-sort={isSorted ? (desc ? "descending" : "ascending") : undefined}
                  >
                    <UnstyledButton
                      visibleFrom="sm"
                      className={classes.sort}
                      onClick={() => (isSorted && desc ? order("joined", false) : order(column.sort, isSorted))}
                    >
                      {column.label}
                      <span aria-hidden className={classes.arrow}>
                        {isSorted ? (desc ? "↓" : "↑") : ""}
                      </span>
                    </UnstyledButton>
                    <Text component="span" inherit hiddenFrom="sm">
                      {column.label}
                    </Text>
                  </Table.Th>
                );
              })}
            </Table.Tr>
          </Table.Thead>
          <Table.Tbody>
            {shown.map((machine) => (
              <Row key={machine.id} machine={machine} island={islands.get(machine.id)} used={isGone(machine) ? undefined : used[machine.id]} />
            ))}
          </Table.Tbody>
        </Table>
      </div>
      {pages > 1 && (
        <Group justify="space-between" component="nav" aria-label={t("Pages of the table")}>
          <Text size="sm" c="dimmed" role="status">
            {t("{{first}}–{{last}} of {{all}}", {
              first: count((page - 1) * PER_PAGE + 1),
              last: count((page - 1) * PER_PAGE + shown.length),
              all: count(all.length),
            })}
          </Text>
          <Group gap="xs">
            <Button variant="default" size="xs" disabled={page === 1} onClick={() => turn(page - 1)}>
              {t("Previous")}
            </Button>
            <Button variant="default" size="xs" disabled={page === pages} onClick={() => turn(page + 1)}>
              {t("Next")}
            </Button>
          </Group>
        </Group>
      )}
    </>
  );
}

const Row = memo(function Row({ machine, island, used }: { machine: MachineSummary; island: number | undefined; used: UtilizationSample | undefined }) {
  const { t } = useTranslation();
  return (
    <Table.Tr>
      <Table.Td data-label={t("Machine")}>
        <MachineLink id={machine.id} name={machine.name} fw={600} />
        <Text size="xs" c="dimmed" maw={260} truncate title={machine.device ?? machine.host}>
          {[machine.owner, machine.device ?? machine.host].filter(Boolean).join(" · ")}
        </Text>
      </Table.Td>
      <Table.Td data-label={t("State")}>
        <StateBadge state={machineState(machine.state, machine.held !== null)} />
        <Text size="xs" c="dimmed" mt={2} maw={220} lineClamp={2} title={translated(machine.reason)}>
          {isGone(machine) ? (
            <>
              {t("last seen")} <Ago moment={machine.last_seen_at} />
            </>
          ) : (
            translated(machine.reason)
          )}
        </Text>
      </Table.Td>
      <Table.Td data-label={t("Work")}>
        <WorkCell machine={machine} />
      </Table.Td>
      <Table.Td data-label={t("Island")}>
        <Text size="sm">{island ?? "–"}</Text>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Speed (float32)")}>
        {speedWords(machine)}
      </Table.Td>
      <Table.Td className="numeric" data-label={t("In use")} title={used && usedWords(t, used)}>
        {busyOf(used) === undefined ? "–" : shareText(busyOf(used)!)}
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Memory")}>
        {memoryWords(t, machine)}
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Link to the server")}>
        {linkWords(machine.head_latency_s, machine.head_bytes_per_s)}
        {machine.head_bytes_per_s !== null && (
          <Text size="xs" c="dimmed">
            {qualityWords(t, qualityOf(machine.head_bytes_per_s))}
          </Text>
        )}
      </Table.Td>
    </Table.Tr>
  );
});

function WorkCell({ machine }: { machine: MachineSummary }) {
  const { t } = useTranslation();
  const { held } = machine;
  if (held === null) {
    return (
      <Text size="sm" c="dimmed">
        –
      </Text>
    );
  }
  const part = partWords(t, held);
  return (
    <>
      <Holder held={held} />
      {part !== null && (
        <Text size="xs" c="dimmed">
          {part}
        </Text>
      )}
    </>
  );
}

/** The job or deployment that holds a machine, as a link. */
export function Holder({ held, isInText = false }: { held: Pick<Held, "job_id" | "deployment_id" | "name">; isInText?: boolean }) {
  const { job_id: job, deployment_id: deployment, name } = held;
  const look = { preload: false, size: "sm", display: "inline-block", underline: isInText ? "always" : "hover" } as const;
  if (job != null) {
    return (
      <AnchorLink to="/jobs/$jobId" params={{ jobId: job }} {...look}>
        {name || job}
      </AnchorLink>
    );
  }
  if (deployment == null) return name;
  return (
    <AnchorLink to="/deployments/$name" params={{ name: deployment }} {...look}>
      {name || deployment}
    </AnchorLink>
  );
}
