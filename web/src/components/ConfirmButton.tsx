/** A button that asks for confirmation, for actions that cannot be undone. */
import { Button, Group, Modal, Stack, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useMutation } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { Failure } from "./Feedback";

interface Props {
  /** Label of the button, and of the button that confirms. */
  action: string;
  /** Accessible name where several buttons have the same label, e.g. in table rows; makes the button small. */
  label?: string;
  /** Label that replaces the action's label while the button is disabled. */
  pending?: string | undefined;
  question: string;
  /** Explains the consequences. */
  children: ReactNode;
  onConfirm: () => Promise<unknown>;
}

export function ConfirmButton({ action, label, pending, question, children, onConfirm }: Props) {
  const { t } = useTranslation();
  const [asks, dialog] = useDisclosure(false);
  const doing = useMutation({ mutationFn: onConfirm, onSuccess: dialog.close });
  const ask = () => {
    doing.reset();
    dialog.open();
  };
  return (
    <>
      <Button size={label === undefined ? "sm" : "compact-sm"} variant="default" onClick={ask} aria-label={label} disabled={pending !== undefined}>
        {pending ?? action}
      </Button>
      <Modal opened={asks} onClose={dialog.close} title={question} centered closeButtonProps={{ "aria-label": t("Close") }}>
        <Stack>
          <Text size="sm">{children}</Text>
          {doing.error !== null && <Failure error={doing.error} />}
          <Group justify="end">
            <Button variant="default" onClick={dialog.close} data-autofocus>
              {t("Keep it")}
            </Button>
            <Button color="red" loading={doing.isPending} onClick={() => doing.mutate()}>
              {action}
            </Button>
          </Group>
        </Stack>
      </Modal>
    </>
  );
}
