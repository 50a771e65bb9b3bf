/** Bring a machine into the pool. */
import { Button, Group, SegmentedControl, Stack, Table, Text, TextInput, VisuallyHidden } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent } from "react";

import { api, body } from "../api/client";
import { invites } from "../api/queries";
import type { Invite } from "../api/types";
import { CopyLine } from "../components/CopyLine";
import { Empty, Failure, Loading } from "../components/Feedback";
import { Page, Section } from "../components/Page";
import { dateAndTime } from "../format";

const EXPIRIES = [
  { value: "3600", label: "1 hour" },
  { value: "86400", label: "1 day" },
  { value: "604800", label: "1 week" },
];

export function Invites() {
  const { data, error, refetch } = useQuery(invites);
  return (
    <Page title="Invite a machine">
      <Create />
      {data !== undefined ? (
        data.length === 0 ? (
          <Empty title="No invite yet">
            <Text>An invite lets one machine join, once, until it expires.</Text>
          </Empty>
        ) : (
          <InviteTable all={data} />
        )
      ) : error !== null ? (
        <Failure error={error} retry={() => void refetch()} />
      ) : (
        <Loading />
      )}
    </Page>
  );
}

function Create() {
  const client = useQueryClient();
  const [label, setLabel] = useState("");
  const [expiresInS, setExpiresInS] = useState("3600");
  const making = useMutation({
    mutationFn: () =>
      body(
        api.POST("/api/v1/invites", {
          body: { expires_in_s: Number(expiresInS), label: label.trim() === "" ? null : label.trim() },
        }),
      ),
    onSuccess: () => {
      setLabel("");
      return client.invalidateQueries({ queryKey: invites.queryKey });
    },
  });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    making.mutate();
  };
  return (
    <Section title="New invite">
      <form onSubmit={submit}>
        <Group align="end">
          <TextInput
            label="For whom"
            placeholder="optional"
            maxLength={80}
            value={label}
            onChange={(event) => setLabel(event.currentTarget.value)}
          />
          <div>
            <Text size="sm" fw={500} mb={2} id="expiry">
              Expires after
            </Text>
            <SegmentedControl aria-labelledby="expiry" value={expiresInS} onChange={setExpiresInS} data={EXPIRIES} />
          </div>
          <Button type="submit" loading={making.isPending}>
            Create invite
          </Button>
        </Group>
      </form>
      {making.error !== null && <Failure error={making.error} />}
      {making.data !== undefined && (
        <Stack gap="xs" aria-live="polite">
          <Text size="sm">
            Run this on the machine that joins. The code is shown only now, works once, and expires{" "}
            {dateAndTime(making.data.expires_at)}.
          </Text>
          <CopyLine text={making.data.join_command} label="Command to join" />
        </Stack>
      )}
    </Section>
  );
}

function InviteTable({ all }: { all: readonly Invite[] }) {
  return (
    <div className="card scroll">
      <Table className="stacking" verticalSpacing="sm" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>Invite</Table.Th>
            <Table.Th>State</Table.Th>
            <Table.Th>Created</Table.Th>
            <Table.Th>
                <VisuallyHidden>Actions</VisuallyHidden>
              </Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {all.map((invite) => (
            <Row key={invite.id} invite={invite} />
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

function Row({ invite }: { invite: Invite }) {
  const client = useQueryClient();
  const revoking = useMutation({
    mutationFn: () => api.DELETE("/api/v1/invites/{invite_id}", { params: { path: { invite_id: invite.id } } }),
    onSuccess: () => client.invalidateQueries({ queryKey: invites.queryKey }),
  });
  const name = invite.label ?? invite.id;
  return (
    <Table.Tr>
      <Table.Td data-label="Invite">{name}</Table.Td>
      <Table.Td data-label="State">
        <Text size="sm" {...(invite.state !== "open" && { c: "dimmed" })}>
          {describe(invite)}
        </Text>
        {revoking.error !== null && <Failure error={revoking.error} />}
      </Table.Td>
      <Table.Td data-label="Created">{dateAndTime(invite.created_at)}</Table.Td>
      <Table.Td className="numeric">
        {invite.state === "open" && (
          <Button
            size="compact-sm"
            variant="default"
            loading={revoking.isPending}
            onClick={() => revoking.mutate()}
            aria-label={`Revoke the invite ${name}`}
          >
            Revoke
          </Button>
        )}
      </Table.Td>
    </Table.Tr>
  );
}

function describe(invite: Invite): string {
  if (invite.state === "open") return `open until ${dateAndTime(invite.expires_at)}`;
  if (invite.state === "used") return `used by ${invite.used_by ?? "a machine"}`;
  return invite.state;
}
