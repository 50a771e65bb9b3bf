import { Button } from "@mantine/core";
import { useClipboard } from "@mantine/hooks";
import { useTranslation } from "react-i18next";

import classes from "./CopyBlock.module.css";

/** Several lines to copy. */
export function CopyBlock({ text, label }: { text: string; label: string }) {
  const { t } = useTranslation();
  const clipboard = useClipboard({ timeout: 2000 });
  return (
    <div className={classes.block}>
      <pre className={classes.text} aria-label={label} tabIndex={0} role="group">
        <code>{text}</code>
      </pre>
      <Button size="compact-sm" variant="default" className={classes.button} onClick={() => clipboard.copy(text)}>
        {clipboard.copied ? t("Copied") : t("Copy")}
      </Button>
    </div>
  );
}
