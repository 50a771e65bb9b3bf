/** Placeholders of a page while there is no data to show. */
import { Alert, Button, Skeleton, Stack, Text, Title } from "@mantine/core";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import starts from "virtual:starts";

import { ApiProblem } from "../api/problem";
import { beginsWithWord } from "../i18n/starts";
import { translated } from "../i18n/texts";

/** Grey lines that replace a list while it is loading. */
export function Loading({ lines = 4 }: { lines?: number | undefined }) {
  const { t } = useTranslation();
  return (
    <Stack gap="sm" role="status" aria-label={t("Loading")}>
      {Array.from({ length: lines }, (_, line) => (
        <Skeleton key={line} height={36} radius="sm" />
      ))}
    </Stack>
  );
}

/** Placeholder for the result of a query: lines while it loads, or its error. */
export function Waiting({ error, refetch, lines }: { error: Error | null; refetch: () => unknown; lines?: number | undefined }) {
  return error === null ? <Loading lines={lines} /> : <Failure error={error} retry={() => void refetch()} />;
}

/** An empty list, with a suggestion for the user. */
export function Empty({ title, children }: { title: string; children?: ReactNode }) {
  return (
    <Stack className="card" align="center" gap="xs" p="xl" ta="center">
      <Title order={2}>{title}</Title>
      <Stack c="dimmed" maw={560} align="center" gap="sm">
        {children}
      </Stack>
    </Stack>
  );
}

/** An error message, its hint, and a button to retry. */
export function Failure({ error, retry }: { error: Error; retry?: () => void }) {
  const { t } = useTranslation();
  const hint = error instanceof ApiProblem ? error.hint : undefined;
  return (
    <Alert className="failure" title={sentence(error.message)}>
      <Stack gap="sm" align="start">
        {hint !== undefined && <Text size="sm">{sentence(hint)}</Text>}
        {retry !== undefined && (
          <Button size="xs" variant="default" onClick={retry}>
            {t("Try again")}
          </Button>
        )}
      </Stack>
    </Alert>
  );
}

/**
 * A message in the reader's language, with a capital and a full stop: the server's messages begin in lower case,
 * because the command line puts "error:" before them. Names, such as those of machines, and commands at the beginning
 * are left unchanged.
 */
export function sentence(message: string): string {
  const text = clause(message);
  return text !== message && text !== `${message}.` ? text : capitalized(text);
}

/** A text with a capital first letter. Names, commands, fields of a job file and names of files stay unchanged. */
export function capitalized(text: string): string {
  const isName = /^(share-compute |pip |\w+[._]\w|\S*\/)/.test(text);
  return !isName && beginsWithWord(text, starts) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
}

/** The same text without the capital, for use after other words. */
export function clause(message: string): string {
  const text = translated(message);
  if (/[.!?。！？]$/.test(text)) return text;
  return text + (/[\u3000-\u9fff\uff00-\uffef]/.test(text) ? "。" : ".");
}
