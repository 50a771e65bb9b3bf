import { Group } from "@mantine/core";

import classes from "./CopyLine.module.css";
import { CopyButton } from "./CopyButton";

/** A command or a key with a button that copies it. */
export function CopyLine({ text, label }: { text: string; label: string }) {
  return (
    <Group gap="xs" wrap="nowrap" align="stretch">
      <code className={classes.line} aria-label={label} tabIndex={0}>
        {text}
      </code>
      <CopyButton text={text} className={classes.button} />
    </Group>
  );
}
