/** The saved conversations of this browser: open, rename, export, delete. */
import { Button, Group, Text, TextInput, UnstyledButton } from "@mantine/core";
import { useMediaQuery } from "@mantine/hooks";
import { memo, useState, useSyncExternalStore, type FormEvent } from "react";
import { useTranslation } from "react-i18next";

import { Ago } from "../../components/Ago";
import { conversation, saved } from "../../talk/conversation";
import { exported, type SavedConversation } from "../../talk/saved";
import classes from "./Conversations.module.css";

interface Props {
  /** Id of the conversation that is shown. */
  current: string;
  onChange: () => void;
}

export const Conversations = memo(function Conversations({ current, onChange }: Props) {
  const { t } = useTranslation();
  const list = useSyncExternalStore(saved.subscribe, saved.list);
  const isUnsaved = useSyncExternalStore(saved.subscribe, saved.unsaved) === current;
  // Open beside the conversation; on a narrow page, where it is above the conversation, it would push the text out of
  // sight.
  const isWide = useMediaQuery("(min-width: 75em)", undefined, { getInitialValueInEffect: false });
  const warning = isUnsaved && (
    <Text size="sm" role="status">
      {t("This conversation does not fit into the browser's storage. It is not saved.")}
    </Text>
  );
  if (list.length === 0) return warning;
  return (
    <details className={`card ${classes.conversations}`} open={isWide}>
      <summary>
        {t("Saved conversations")}
        <Text component="span" size="sm" c="dimmed" ml="xs">
          {list.length}
        </Text>
      </summary>
      {warning}
      <Text size="xs" c="dimmed" mt="xs">
        {t("Kept in this browser until you sign out or delete them. Of more than 50 the oldest are dropped.")}
      </Text>
      <ul className={classes.list}>
        {list.map((one) => (
          <Item key={one.id} one={one} isCurrent={one.id === current} onChange={onChange} />
        ))}
      </ul>
    </details>
  );
});

function Item({ one, isCurrent, onChange }: { one: SavedConversation; isCurrent: boolean; onChange: () => void }) {
  const { t } = useTranslation();
  const [title, setTitle] = useState<string | null>(null);
  const rename = (event: FormEvent) => {
    event.preventDefault();
    saved.rename(one.id, title ?? "");
    setTitle(null);
  };
  if (title !== null) {
    return (
      <li className={classes.item}>
        <form className={classes.form} onSubmit={rename}>
          <TextInput
            size="xs"
            aria-label={t("Title of the conversation")}
            value={title}
            maxLength={60}
            autoFocus
            onChange={(event) => setTitle(event.currentTarget.value)}
            onKeyDown={(event) => {
              if (event.key !== "Escape") return;
              event.preventDefault(); // it does not stop the answers
              setTitle(null);
            }}
          />
          <Button size="compact-sm" type="submit">
            {t("Rename")}
          </Button>
        </form>
      </li>
    );
  }
  return (
    <li className={classes.item}>
      <UnstyledButton
        className={classes.open}
        aria-current={isCurrent ? "true" : undefined}
        onClick={() => {
          conversation.open(one.id);
          onChange();
        }}
      >
        <span className={classes.title}>{one.title}</span>
        <Text component="span" size="xs" c="dimmed">
          <Ago moment={new Date(one.at).toISOString()} />
        </Text>
      </UnstyledButton>
      <Group gap={4} wrap="nowrap" className={classes.buttons!}>
        <Button size="compact-xs" variant="subtle" onClick={() => setTitle(one.title)} aria-label={t("Rename {{title}}", { title: one.title })}>
          {t("Rename")}
        </Button>
        <Button size="compact-xs" variant="subtle" onClick={() => download(one)} aria-label={t("Export {{title}} as JSON", { title: one.title })}>
          {t("Export")}
        </Button>
        <Button
          size="compact-xs"
          variant="subtle"
          onClick={() => {
            conversation.remove(one.id);
            onChange();
          }}
          aria-label={t("Delete {{title}}", { title: one.title })}
        >
          {t("Delete")}
        </Button>
      </Group>
    </li>
  );
}

function download(one: SavedConversation): void {
  const url = URL.createObjectURL(new Blob([exported(one)], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${one.title.replace(/[^\p{L}\p{N}._-]+/gu, "-").slice(0, 40) || "conversation"}.json`;
  link.click();
  URL.revokeObjectURL(url);
}
