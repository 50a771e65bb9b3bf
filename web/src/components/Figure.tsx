import { Text } from "@mantine/core";

interface Props {
  label: string;
  value: string;
  title?: string;
  /** Fraction from 0 to 1, drawn as a bar. */
  share?: number;
}

/** One number with its label. */
export function Figure({ label, value, title, share }: Props) {
  return (
    <dl className="card figure" title={title}>
      <Text component="dt" size="xs" c="dimmed">
        {label}
      </Text>
      <Text component="dd" size="lg" fw={600}>
        {value}
      </Text>
      {share !== undefined && (
        <dd className="gauge" aria-hidden>
          <span style={{ width: `${100 * Math.min(1, share)}%` }} />
        </dd>
      )}
    </dl>
  );
}
