import "@mantine/core/styles/Checkbox.css";

import { Button, Checkbox, Group, Stack, Switch, Table, Text, TextInput } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent } from "react";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { fetchAgain } from "../../api/fetchAgain";
import { GRANTABLE } from "../../api/scopes";
import { useSession } from "../../api/session";
import type { ApiKey } from "../../api/types";
import { ConfirmButton } from "../../components/ConfirmButton";
import { CopyLine } from "../../components/copy/CopyLine";
import { Failure } from "../../components/Feedback";
import { count, dateAndTime } from "../../format";
import { keys as keysQuery } from "./queries";

type Granted = (typeof GRANTABLE)[number];

/** API keys: one for each person or program, so that keys can be revoked one at a time. */
export function Keys({ keys }: { keys: readonly ApiKey[] }) {
  const { t } = useTranslation();
  const [showsRevoked, setShowsRevoked] = useState(false);
  const revoked = keys.filter((key) => key.revoked_at !== null).length;
  const shown = showsRevoked ? keys : keys.filter((key) => key.revoked_at === null);
  return (
    <Stack gap="md">
      <Create />
      <div className="scroll">
        <Table className="stacking" verticalSpacing="xs">
          <Table.Thead>
            <Table.Tr>
              <Table.Th>{t("Key")}</Table.Th>
              <Table.Th>{t("Scopes")}</Table.Th>
              <Table.Th>{t("Created")}</Table.Th>
              <Table.Th>{t("State")}</Table.Th>
              <Table.Th className="numeric">{t("Actions")}</Table.Th>
            </Table.Tr>
          </Table.Thead>
          <Table.Tbody>
            {shown.map((key) => (
              <Row key={key.id} record={key} />
            ))}
          </Table.Tbody>
        </Table>
      </div>
      {revoked > 0 && (
        <Switch
          label={t("Show the revoked ({{number}})", { number: count(revoked) })}
          checked={showsRevoked}
          onChange={(event) => setShowsRevoked(event.currentTarget.checked)}
        />
      )}
    </Stack>
  );
}

function Create() {
  const { t } = useTranslation();
  const client = useQueryClient();
  const [name, setName] = useState("");
  const [scopes, setScopes] = useState<Granted[]>(["chat"]);
  const making = useMutation({
    mutationFn: () => body(api.POST("/api/v1/keys", { body: { name: name.trim(), scopes } })),
    onSuccess: () => {
      setName("");
      return fetchAgain(client, { queryKey: keysQuery.queryKey });
    },
  });
  const meaning: Record<Granted, string> = {
    chat: t("talk to the models that are served"),
    read: t("look at jobs, machines and deployments"),
    submit: t("run jobs, deploy models and upload; includes read and chat"),
    admin: t("everything: also invites, keys, machines, and what belongs to other keys"),
  };
  const submit = (event: FormEvent) => {
    event.preventDefault();
    making.mutate();
  };
  return (
    <Stack gap="sm">
      <form onSubmit={submit}>
        <Group align="end">
          <TextInput
            label={t("For whom or what")}
            maxLength={80}
            required
            withAsterisk={false}
            value={name}
            onChange={(event) => setName(event.currentTarget.value)}
          />
          <Button type="submit" loading={making.isPending} disabled={name.trim() === "" || scopes.length === 0}>
            {t("Create key")}
          </Button>
        </Group>
        <Checkbox.Group
          mt="sm"
          label={t("Scopes")}
          value={scopes}
          onChange={(chosen) => setScopes(GRANTABLE.filter((scope) => chosen.includes(scope)))}
        >
          <Stack gap={6} mt={4}>
            {GRANTABLE.map((scope) => (
              <Checkbox key={scope} value={scope} label={`${scope}: ${meaning[scope]}`} />
            ))}
          </Stack>
        </Checkbox.Group>
      </form>
      {making.error !== null && <Failure error={making.error} />}
      {making.data !== undefined && (
        <Stack gap="xs" aria-live="polite">
          <Text size="sm">
            {t("This is the key of {{name}}. Copy it: it is shown only now. Programs send it as a bearer token.", {
              name: making.data.name,
            })}
          </Text>
          <CopyLine text={making.data.key} label={t("New API key")} />
          <Text size="sm">{t("share-compute's commands and Python client use it after:")}</Text>
          <CopyLine text={making.data.export_command} label={t("Command for a shell")} />
        </Stack>
      )}
    </Stack>
  );
}

function Row({ record }: { record: ApiKey }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const session = useSession();
  const isOurs = session.state === "in" && session.key.id === record.id;
  const params = { path: { key_id: record.id } };
  return (
    <Table.Tr>
      <Table.Td data-label={t("Key")}>
        <Text size="sm" fw={600}>
          {record.name}
        </Text>
        <Text size="xs" c="dimmed">
          {record.id}
        </Text>
      </Table.Td>
      <Table.Td data-label={t("Scopes")}>{record.scopes.join(", ")}</Table.Td>
      <Table.Td data-label={t("Created")}>{dateAndTime(record.created_at)}</Table.Td>
      <Table.Td data-label={t("State")}>
        <Text size="sm" {...(record.revoked_at !== null && { c: "dimmed" })}>
          {record.revoked_at !== null
            ? t("revoked {{when}}", { when: dateAndTime(record.revoked_at) })
            : isOurs
              ? t("works; you are signed in with it")
              : t("works")}
        </Text>
      </Table.Td>
      <Table.Td className="numeric" data-label={t("Actions")}>
        {record.revoked_at === null && (
          <ConfirmButton
            action={t("Revoke")}
            label={t("Revoke the key {{name}}", { name: record.name })}
            question={t("Revoke the key {{name}}?", { name: record.name })}
            onConfirm={async () => {
              try {
                await api.DELETE("/api/v1/keys/{key_id}", { params });
              } finally {
                // The server may have revoked the key although its answer was lost.
                await fetchAgain(client, { queryKey: keysQuery.queryKey });
              }
            }}
          >
            {isOurs
              ? t("You are signed in with it, so you are signed out too, and need another key to come back.")
              : t("Programs that use it are refused from then on; browsers that signed in with it are signed out.")}
          </ConfirmButton>
        )}
      </Table.Td>
    </Table.Tr>
  );
}
