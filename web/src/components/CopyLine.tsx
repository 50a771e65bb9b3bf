import { Button, Group, Text } from "@mantine/core";
import { useClipboard } from "@mantine/hooks";
import { useTranslation } from "react-i18next";

import classes from "./CopyLine.module.css";

/** A command or a key to copy. */
export function CopyLine({ text, label }: { text: string; label: string }) {
  const { t } = useTranslation();
  const clipboard = useClipboard({ timeout: 2000 });
  return (
    <Group gap="xs" wrap="nowrap" align="stretch">
      <code className={classes.line} aria-label={label} tabIndex={0}>
        {text}
      </code>
      <Button variant="default" onClick={() => clipboard.copy(text)} className={classes.button}>
        {clipboard.copied ? t("Copied") : t("Copy")}
      </Button>
      {clipboard.error !== null && (
        <Text size="sm" c="dimmed">
          {t("Select and copy by hand.")}
        </Text>
      )}
    </Group>
  );
}
