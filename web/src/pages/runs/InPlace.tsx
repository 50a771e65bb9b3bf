/** A text that is edited where it is shown: Enter or leaving the field saves the new text, Escape keeps the old one. */
import { ActionIcon, Textarea, TextInput } from "@mantine/core";
import { useMutation } from "@tanstack/react-query";
import { useRef, useState, type KeyboardEvent, type ReactNode } from "react";

import { ApiProblem } from "../../api/problem";
import { sentence } from "../../components/Feedback";
import classes from "./Runs.module.css";

interface Props {
  /** Accessible name of the field and its button: "Tags of digits". */
  label: string;
  value: string;
  placeholder: string;
  /** Whether the text may have several lines; then Shift+Enter adds one. */
  isLong?: boolean;
  onSave: (text: string) => Promise<unknown>;
  /** The text as it is shown. */
  children: ReactNode;
}

export function InPlace({ label, value, placeholder, isLong = false, onSave, children }: Props) {
  const [text, setText] = useState<string | null>(null);
  const button = useRef<HTMLButtonElement>(null);
  const close = () => {
    setText(null);
    saving.reset();
    // Runs after the field is removed, so that keyboard focus stays here.
    requestAnimationFrame(() => button.current?.focus());
  };
  const saving = useMutation({ mutationFn: onSave, onSuccess: close });
  if (text === null) {
    return (
      <div className={classes.inPlace}>
        {children}
        <ActionIcon ref={button} className={classes.edit} variant="subtle" color="gray" size="xs" aria-label={label} title={label} onClick={() => setText(value)}>
          ✎
        </ActionIcon>
      </div>
    );
  }
  const save = () => {
    if (saving.isPending) return;
    if (text.trim() === value) close();
    else saving.mutate(text.trim());
  };
  const onKeyDown = (event: KeyboardEvent) => {
    // Enter also ends the input of Chinese characters.
    if (event.nativeEvent.isComposing) return;
    if (event.key === "Escape") close();
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    save();
  };
  const shared = {
    "size": "xs",
    "aria-label": label,
    placeholder,
    "value": text,
    "error": saving.error === null ? undefined : messageOf(saving.error),
    "disabled": saving.isPending,
    "autoFocus": true,
    onKeyDown,
    // Leaving the field does not resend a refused text.
    "onBlur": () => saving.isError || save(),
  } as const;
  return isLong ? (
    <Textarea {...shared} className={classes.field} rows={3} maxLength={2000} onChange={(event) => setText(event.currentTarget.value)} />
  ) : (
    <TextInput {...shared} className={classes.field} onChange={(event) => setText(event.currentTarget.value)} />
  );
}

function messageOf(error: Error): string {
  return [error.message, error instanceof ApiProblem && error.hint].filter((text) => typeof text === "string").map(sentence).join(" ");
}
