import { Group, Stack, Title } from "@mantine/core";
import { useDocumentTitle } from "@mantine/hooks";
import type { ReactNode } from "react";

interface Props {
  title: string;
  /** Content next to the title, such as a badge or a count. */
  beside?: ReactNode;
  /** Buttons at the far end. */
  actions?: ReactNode;
  children: ReactNode;
}

/** Heading, actions and content of one page. */
export function Page({ title, beside, actions, children }: Props) {
  useDocumentTitle(`${title} · share-compute`);
  return (
    <Stack gap="lg">
      <Group justify="space-between" align="center">
        <Group gap="sm">
          <Title order={1}>{title}</Title>
          {beside}
        </Group>
        {actions !== undefined && <Group gap="xs">{actions}</Group>}
      </Group>
      {children}
    </Stack>
  );
}

/** One titled part of a page. */
export function Section({ title, actions, children }: Omit<Props, "beside">) {
  return (
    <section className="card" aria-label={title}>
      <Stack gap="md" p="md">
        <Group justify="space-between">
          <Title order={2}>{title}</Title>
          {actions}
        </Group>
        {children}
      </Stack>
    </section>
  );
}
