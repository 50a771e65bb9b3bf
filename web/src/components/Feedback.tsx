/** What a page shows while it has nothing else to show. */
import { Alert, Button, Skeleton, Stack, Text, Title } from "@mantine/core";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { ApiProblem } from "../api/problem";

/** Grey lines where a list is about to be. */
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

/** Stands where the answer to a query will be: lines, or why there is none. */
export function Waiting({ error, refetch, lines }: { error: Error | null; refetch: () => unknown; lines?: number | undefined }) {
  return error === null ? <Loading lines={lines} /> : <Failure error={error} retry={() => void refetch()} />;
}

/** Nothing there, and what to do about it. */
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

/** An error in words, its hint, and a second try. */
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
 * The server's messages begin in lower case, since the command line puts "error:" before them. A command at the
 * beginning stays as it is typed.
 */
export function sentence(text: string): string {
  const end = /[.!?]$/.test(text) ? "" : ".";
  const start = /^(share-compute|pip) /.test(text) ? text.charAt(0) : text.charAt(0).toUpperCase();
  return start + text.slice(1) + end;
}
