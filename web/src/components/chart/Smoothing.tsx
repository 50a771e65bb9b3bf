import { Group, Text } from "@mantine/core";
import { useId } from "react";
import { useTranslation } from "react-i18next";

import classes from "./Smoothing.module.css";

/** A slider for the smoothing of curves, from 0 to 0.98. */
export function Smoothing({ value, onChange }: { value: number; onChange: (value: number) => void }) {
  const { t } = useTranslation();
  const id = useId();
  return (
    <Group gap={6} wrap="nowrap">
      <Text component="label" htmlFor={id} size="xs" c="dimmed">
        {t("Smoothing")}
      </Text>
      <input
        id={id}
        type="range"
        className={classes.range}
        min={0}
        max={0.98}
        step={0.02}
        value={value}
        aria-valuetext={value === 0 ? t("none") : value.toFixed(2)}
        onChange={(event) => onChange(Number(event.currentTarget.value))}
      />
    </Group>
  );
}
