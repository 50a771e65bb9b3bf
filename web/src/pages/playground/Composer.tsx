import { Button, Group, Text, Textarea } from "@mantine/core";
import { useState, type KeyboardEvent } from "react";
import { useTranslation } from "react-i18next";

import classes from "./Playground.module.css";

interface Props {
  /** Initial text of the field. */
  start: string;
  isEditing: boolean;
  isRunning: boolean;
  canSend: boolean;
  onSend: (prompt: string) => void;
  onStop: () => void;
  onCancel: () => void;
}

/** The prompt: Enter sends it, Shift+Enter starts a new line. */
export function Composer({ start, isEditing, isRunning, canSend, onSend, onStop, onCancel }: Props) {
  const { t } = useTranslation();
  const [text, setText] = useState(start);
  const isReady = canSend && !isRunning && text.trim() !== "";
  const send = () => {
    if (!isReady) return;
    onSend(text);
    setText("");
  };
  const press = (event: KeyboardEvent) => {
    // While an input method composes a character, Enter confirms that character.
    if (event.key !== "Enter" || event.shiftKey || event.nativeEvent.isComposing) return;
    event.preventDefault();
    send();
  };
  return (
    <form
      className={classes.composer}
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
    >
      <Textarea
        aria-label={t("Your message")}
        placeholder={t("Your message")}
        rows={Math.min(8, Math.max(2, text.split("\n").length))}
        value={text}
        onChange={(event) => setText(event.currentTarget.value)}
        onKeyDown={press}
        autoFocus
      />
      <Group justify="space-between" gap="xs">
        <Text size="xs" c="dimmed" visibleFrom="sm">
          {isRunning ? t("Esc stops.") : t("Enter sends, Shift+Enter begins a line.")}
        </Text>
        <Group gap="xs" ml="auto">
          {isEditing && (
            <Button variant="subtle" onClick={onCancel}>
              {t("Leave it as it was")}
            </Button>
          )}
          {isRunning ? (
            <Button variant="default" onClick={onStop}>
              {t("Stop")}
            </Button>
          ) : (
            <Button type="submit" disabled={!isReady}>
              {isEditing ? t("Send anew") : t("Send")}
            </Button>
          )}
        </Group>
      </Group>
    </form>
  );
}
