/** A button for what cannot be taken back: it asks first. */
import { Button, Group, Modal, Stack, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useMutation } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { Failure } from "./Feedback";

interface Props {
  /** On the button, and on the one that does it. */
  action: string;
  /** What the button is called where several are alike, e.g. in the rows of a table; it is a small one then. */
  label?: string;
  /** What stands on the button in place of the action, while it cannot be pressed. */
  pending?: string | undefined;
  question: string;
  /** What happens then. */
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
