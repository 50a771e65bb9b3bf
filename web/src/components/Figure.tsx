import { Text } from "@mantine/core";

/** One number with its label. */
export function Figure({ label, value, title }: { label: string; value: string; title?: string }) {
  return (
    <dl className="card figure" title={title}>
      <Text component="dt" size="xs" c="dimmed">
        {label}
      </Text>
      <Text component="dd" size="lg" fw={600}>
        {value}
      </Text>
    </dl>
  );
}
