/** Invites for machines to join the cluster. */
import { Alert, Button, Group, Input, NumberInput, SegmentedControl, Stack, Table, Text, TextInput, VisuallyHidden } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent } from "react";
import { Trans, useTranslation } from "react-i18next";

import { api, body } from "../api/client";
import { fetchAgain } from "../api/fetchAgain";
import { invites, status } from "../api/queries";
import type { Invite, InviteCreated } from "../api/types";
import { CopyLine } from "../components/copy/CopyLine";
import { Empty, Failure, Waiting } from "../components/Feedback";
import { Page, Section } from "../components/frame/Page";
import { AnchorLink } from "../components/links";
import { bytes, dateAndTime, duration } from "../format";
import { useNow } from "../useNow";
import { stateAt } from "./invites/stateAt";

/** Least memory that a machine can lend. */
const LEAST_GIB = 0.5;

export function Invites() {
  const { t } = useTranslation();
  const { data, error, refetch } = useQuery(invites);
  return (
    <Page title={t("Invite a machine")}>
      <Unreachable />
      <Create all={data ?? []} />
      {data !== undefined ? (
        data.length === 0 ? (
          <Empty title={t("No invite yet")}>
            <Text>{t("An invite lets one machine or several join until it expires.")}</Text>
          </Empty>
        ) : (
          <InviteTable all={data} />
        )
      ) : (
        <Waiting error={error} refetch={refetch} />
      )}
    </Page>
  );
}

/** A warning if no other machine can join. */
function Unreachable() {
  const { t } = useTranslation();
  const { data: server } = useQuery(status);
  if (server?.is_for_one_machine !== true) return null;
  return (
    <Alert color="orange" className="caution" title={t("Only the server's own machine can join")}>
      <Text size="sm">
        <Trans
          i18nKey="Others join over HTTPS, at an address that they can reach; the server's address is {{url}}. To let others join, start it again with <code>share-compute up --host 0.0.0.0 --tls self-signed</code>, then create the invite."
          values={{ url: server.url }}
          components={{ code: <code /> }}
        />
      </Text>
    </Alert>
  );
}

function Create({ all }: { all: readonly Invite[] }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const [label, setLabel] = useState("");
  const [expiresInS, setExpiresInS] = useState("3600");
  const [uses, setUses] = useState<number | string>(1);
  const [memoryGib, setMemoryGib] = useState<number | string>("");
  const making = useMutation({
    mutationFn: () =>
      body(
        api.POST("/api/v1/invites", {
          body: {
            expires_in_s: Number(expiresInS),
            label: label.trim() === "" ? null : label.trim(),
            uses: Math.max(1, Number(uses)),
            memory_bytes: memoryGib === "" ? null : Math.round(Math.max(LEAST_GIB, Number(memoryGib)) * 2 ** 30),
          },
        }),
      ),
    onSuccess: () => {
      setLabel("");
      return fetchAgain(client, { queryKey: invites.queryKey });
    },
  });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    making.mutate();
  };
  const expiries = [
    { value: "3600", label: t("1 hour") },
    { value: "86400", label: t("1 day") },
    { value: "604800", label: t("1 week") },
  ];
  return (
    <Section title={t("New invite")}>
      <form onSubmit={submit}>
        <Group align="end">
          <TextInput
            label={t("For whom")}
            placeholder={t("optional")}
            maxLength={80}
            value={label}
            onChange={(event) => setLabel(event.currentTarget.value)}
          />
          <NumberInput
            label={t("Machines")}
            w={100}
            min={1}
            max={10000}
            allowDecimal={false}
            value={uses}
            onChange={setUses}
          />
          <NumberInput
            label={t("Memory limit (GiB)")}
            placeholder={t("no limit")}
            w={150}
            min={LEAST_GIB}
            max={65536}
            value={memoryGib}
            onChange={setMemoryGib}
          />
          <Input.Wrapper label={t("Expires after")} labelElement="div" labelProps={{ id: "expiry" }}>
            <div>
              <SegmentedControl aria-labelledby="expiry" value={expiresInS} onChange={setExpiresInS} data={expiries} />
            </div>
          </Input.Wrapper>
          <Button type="submit" loading={making.isPending}>
            {t("Create invite")}
          </Button>
        </Group>
      </form>
      {making.error !== null && <Failure error={making.error} />}
      {making.data !== undefined && (
        <Made made={making.data} invite={all.find((invite) => invite.id === making.data.id)} />
      )}
    </Section>
  );
}

/** The new invite's command, until a machine has joined with it or the invite has ended. */
function Made({ made, invite }: { made: InviteCreated; invite: Invite | undefined }) {
  const { t } = useTranslation();
  const now = useNow();
  const state = invite === undefined ? "open" : stateAt(invite, now);
  return (
    <Stack gap="xs" aria-live="polite">
      {state === "open" ? (
        <>
          <Text size="sm">
            {t("Run these on the machines that join. The code is shown only now, works {{count}} times, and expires {{when}}.", {
              count: made.uses,
              when: dateAndTime(made.expires_at),
            })}
          </Text>
          <Text size="sm" fw={600}>
            {t("1. Install share-compute, if the machine does not have it")}
          </Text>
          <CopyLine text={made.install_command} label={t("Command to install")} />
          <Text size="sm" fw={600}>
            {t("2. Join")}
          </Text>
          <CopyLine text={made.join_command} label={t("Command to join")} />
          {invite?.memory_bytes != null && (
            <Text size="sm">
              {t("A machine that would lend more is refused; it joins with --memory and {{size}} or less.", {
                size: bytes(invite.memory_bytes),
              })}
            </Text>
          )}
          <Text size="sm" c="dimmed">
            {t("With `service install` in place of `join` the machine joins at each boot.")}
          </Text>
        </>
      ) : state === "used" ? (
        <Group gap="md">
          <Text size="sm">{t("{{name}} joined with it.", { name: invite?.machines.join(", ") })}</Text>
          <AnchorLink to="/" size="sm">
            {t("Go to the machines")}
          </AnchorLink>
        </Group>
      ) : (
        <Text size="sm">{t("This invite does not work any more. Create another one.")}</Text>
      )}
    </Stack>
  );
}

function InviteTable({ all }: { all: readonly Invite[] }) {
  const { t } = useTranslation();
  const now = useNow(all.some((invite) => invite.state === "open"));
  return (
    <div className="card scroll">
      <Table className="stacking" verticalSpacing="sm" horizontalSpacing="md">
        <Table.Thead>
          <Table.Tr>
            <Table.Th>{t("Invite")}</Table.Th>
            <Table.Th>{t("State")}</Table.Th>
            <Table.Th>{t("Created")}</Table.Th>
            <Table.Th>
              <VisuallyHidden>{t("Actions")}</VisuallyHidden>
            </Table.Th>
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {all.map((invite) => (
            <Row key={invite.id} invite={invite} now={now} />
          ))}
        </Table.Tbody>
      </Table>
    </div>
  );
}

function Row({ invite, now }: { invite: Invite; now: number }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const revoking = useMutation({
    mutationFn: () => api.DELETE("/api/v1/invites/{invite_id}", { params: { path: { invite_id: invite.id } } }),
    // A refusal means that a machine used the invite in the meantime.
    onSettled: () => fetchAgain(client, { queryKey: invites.queryKey }),
  });
  const name = invite.label ?? invite.id;
  const isOpen = stateAt(invite, now) === "open";
  return (
    <Table.Tr>
      <Table.Td data-label={t("Invite")}>
        <Text size="sm" fw={isOpen ? 600 : 400}>
          {name}
        </Text>
        {invite.label !== null && (
          <Text size="xs" c="dimmed">
            {invite.id}
          </Text>
        )}
      </Table.Td>
      <Table.Td data-label={t("State")}>
        <State invite={invite} now={now} />
        {revoking.error !== null && <Failure error={revoking.error} />}
      </Table.Td>
      <Table.Td data-label={t("Created")}>{dateAndTime(invite.created_at)}</Table.Td>
      <Table.Td className="numeric">
        {isOpen && (
          <Button
            size="compact-sm"
            variant="default"
            loading={revoking.isPending}
            onClick={() => revoking.mutate()}
            aria-label={t("Revoke the invite {{name}}", { name })}
          >
            {t("Revoke")}
          </Button>
        )}
      </Table.Td>
    </Table.Tr>
  );
}

/** The state of an invite, with the machine and the time below it. */
function State({ invite, now }: { invite: Invite; now: number }) {
  const { t } = useTranslation();
  const usedAndLeft =
    invite.uses === 1 ? "" : t("{{used}} of {{uses}} uses", { used: invite.used_by.length, uses: invite.uses }) + " · ";
  const texts: Record<Invite["state"], [string, string]> = {
    open: [
      t("open"),
      usedAndLeft + t("for {{time}}, until {{when}}", {
        time: duration(Math.max(0, Math.round((Date.parse(invite.expires_at) - now) / 1000))),
        when: dateAndTime(invite.expires_at),
      }),
    ],
    used: [
      t("used"),
      t("by {{name}}, {{when}}", { name: invite.machines.join(", "), when: when(invite.used_at) }),
    ],
    expired: [t("expired"), usedAndLeft + dateAndTime(invite.expires_at)],
    revoked: [t("revoked"), usedAndLeft + when(invite.revoked_at)],
  };
  const state = stateAt(invite, now);
  const [word, more] = texts[state];
  return (
    <>
      <Text size="sm" {...(state !== "open" && { c: "dimmed" })}>
        {word}
      </Text>
      <Text size="xs" c="dimmed">
        {more}
      </Text>
    </>
  );
}

function when(moment: string | null): string {
  return moment === null ? "" : dateAndTime(moment);
}
