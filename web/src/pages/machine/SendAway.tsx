/** Ask a machine to go, after asking whether that is meant. */
import { Button, Group, Modal, Stack, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { machine as machineQuery } from "../../api/queries";
import type { Machine } from "../../api/types";
import { Failure } from "../../components/Feedback";
import { isGone } from "../machine";

export function SendAway({ machine }: { machine: Machine }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const [isAsking, question] = useDisclosure(false);
  const sending = useMutation({
    mutationFn: () =>
      body(api.DELETE("/api/v1/contributors/{contributor_id}", { params: { path: { contributor_id: machine.id } } })),
    onSuccess: () => {
      question.close();
      return client.invalidateQueries({ queryKey: machineQuery(machine.id).queryKey });
    },
  });
  if (isGone(machine) || machine.sent_away_at !== null) return null;
  return (
    <>
      <Button variant="default" onClick={question.open}>
        {t("Send away")}
      </Button>
      <Modal opened={isAsking} onClose={question.close} title={t("Send {{name}} away?", { name: machine.name })} closeButtonProps={{ "aria-label": t("Close") }}>
        <Stack>
          <Text size="sm">
            {machine.held == null
              ? t("It leaves at once, and can come back only with a new invite.")
              : t("It hands over what it holds, then leaves, and can come back only with a new invite.")}
          </Text>
          {sending.error !== null && <Failure error={sending.error} />}
          <Group justify="end">
            <Button variant="default" onClick={question.close}>
              {t("Keep it")}
            </Button>
            <Button color="red" loading={sending.isPending} onClick={() => sending.mutate()}>
              {t("Send away")}
            </Button>
          </Group>
        </Stack>
      </Modal>
    </>
  );
}
