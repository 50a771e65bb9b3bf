/** The machines of the pool, as they are now. */
import { Code, SimpleGrid, Stack, Switch, Table, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";

import { contributors } from "../api/queries";
import type { Contributor } from "../api/types";
import { Empty, Failure, Loading } from "../components/Feedback";
import { Figure } from "../components/Figure";
import { AnchorLink, ButtonLink } from "../components/links";
import { Page } from "../components/Page";
import { StateBadge } from "../components/StateBadge";
import { ago, bytes, latency, si } from "../format";
import { useNow } from "../useNow";
import { flopsPerS, headLink, isGone, lentBytes } from "./machine";

export function Pool() {
  const { data, error, refetch } = useQuery(contributors);
  return (
    <Page
      title="Pool"
      actions={
        <ButtonLink to="/invites" variant="default">
          Invite a machine
        </ButtonLink>
      }
    >
      {data !== undefined ? (
        <Machines all={data} />
      ) : error !== null ? (
        <Failure error={error} retry={() => void refetch()} />
      ) : (
        <Loading />
      )}
    </Page>
  );
}

function Machines({ all }: { all: readonly Contributor[] }) {
  const [showsGone, setShowsGone] = useState(false);
  const here = all.filter((machine) => !isGone(machine));
  const shown = showsGone ? all : here;
  const goneCount = all.length - here.length;
  if (all.length === 0) return <NobodyYet />;
  return (
    <>
      <SimpleGrid cols={{ base: 2, sm: 4 }} spacing="sm">
        <Figure label="Machines here" value={`${here.length}`} />
        <Figure label="At work" value={`${here.filter((machine) => machine.job_id !== null).length}`} />
        <Figure label="Measured speed" value={si(here.reduce((sum, machine) => sum + flopsPerS(machine), 0), "FLOP/s")} />
        <Figure label="Memory lent" value={bytes(here.reduce((sum, machine) => sum + lentBytes(machine), 0))} />
      </SimpleGrid>
      {goneCount > 0 && (
        <Switch
          label={`Show ${goneCount} that left`}
          checked={showsGone}
          onChange={(event) => setShowsGone(event.currentTarget.checked)}
        />
      )}
      {shown.length === 0 ? (
        <Empty title="No machine is here now">
          <Text>Those that joined have left. A new invite brings in another.</Text>
        </Empty>
      ) : (
        <MachineTable machines={shown} />
      )}
    </>
  );
}

function MachineTable({ machines }: { machines: readonly Contributor[] }) {
  const now = useNow();
  return (
    <div className="card scroll">
      <Table className="stacking" verticalSpacing="sm" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>Machine</Table.Th>
            <Table.Th>State</Table.Th>
            <Table.Th>Work</Table.Th>
            <Table.Th className="numeric">Speed (float32)</Table.Th>
            <Table.Th className="numeric">Memory lent</Table.Th>
            <Table.Th className="numeric">Link to head</Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {machines.map((machine) => (
            <Row key={machine.id} machine={machine} now={now} />
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

function Row({ machine, now }: { machine: Contributor; now: number }) {
  const link = headLink(machine);
  const devices = machine.capacity?.map((device) => device.name).join(", ");
  return (
    <Table.Tr>
      <Table.Td data-label="Machine">
        <Text size="sm" fw={600}>
          {machine.name}
        </Text>
        <Text size="xs" c="dimmed" maw={280} truncate title={devices}>
          {devices ?? machine.host}
        </Text>
      </Table.Td>
      <Table.Td data-label="State">
        <StateBadge state={machine.state} />
        <Text size="xs" c="dimmed" mt={2} title={machine.reason}>
          {isGone(machine) ? `last seen ${ago(machine.last_seen_at, now)}` : machine.reason}
        </Text>
      </Table.Td>
      <Table.Td data-label="Work">
        {machine.job_id === null ? (
          <Text size="sm" c="dimmed">
            {machine.state === "ready" ? "free" : "–"}
          </Text>
        ) : (
          <AnchorLink to="/jobs/$jobId" params={{ jobId: machine.job_id }} size="sm">
            {machine.job_id}
          </AnchorLink>
        )}
      </Table.Td>
      <Table.Td className="numeric" data-label="Speed">{machine.capacity === null ? "–" : si(flopsPerS(machine), "FLOP/s")}</Table.Td>
      <Table.Td className="numeric" data-label="Memory lent">{bytes(lentBytes(machine))}</Table.Td>
      <Table.Td className="numeric" data-label="Link to head">
        {link === undefined ? "–" : `${latency(link.latency_s)} · ${si(link.bytes_per_s, "B/s")}`}
      </Table.Td>
    </Table.Tr>
  );
}

function NobodyYet() {
  return (
    <Empty title="No machine has joined yet">
      <Text>
        Create an invite and run its line on the machine that lends its power, or start the server with{" "}
        <Code>share-compute up --contribute</Code> to lend this one.
      </Text>
      <Stack>
        <ButtonLink to="/invites">
          Create an invite
        </ButtonLink>
      </Stack>
    </Empty>
  );
}
