import { Button, Stack, Text } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import type { ClusterEvent } from "../../../api/types";
import { count } from "../../../format";
import classes from "./Samples.module.css";

const SHOWN = 4;

export interface Sample {
  step: number;
  prompt: string;
  text: string;
}

/** Texts that the model generated during training, newest first. */
export function Samples({ samples }: { samples: readonly Sample[] }) {
  const { t } = useTranslation();
  const [isWhole, setWhole] = useState(false);
  const shown = isWhole ? samples : samples.slice(0, SHOWN);
  return (
    <Stack gap="sm" align="start">
      <ol className={classes.samples}>
        {shown.map(({ step, prompt, text }) => (
          <li key={`${step} ${prompt}`} className={classes.sample}>
            <Text size="xs" c="dimmed">
              {t("step {{step}}", { step: count(step) })}
            </Text>
            <Text size="sm" className={classes.text}>
              <b>{prompt}</b>
              {text}
            </Text>
          </li>
        ))}
      </ol>
      {samples.length > SHOWN && (
        <Button size="compact-sm" variant="default" onClick={() => setWhole(!isWhole)}>
          {isWhole ? t("Show the newest only") : t("Show all {{number}} samples", { number: count(samples.length) })}
        </Button>
      )}
    </Stack>
  );
}

/** Samples by step, newest first. A resumed attempt repeats some samples; the later sample replaces the earlier. */
export function samplesIn(events: readonly ClusterEvent[]): Sample[] {
  const found = new Map<string, Sample>();
  for (const { kind, data } of events) {
    if (kind !== "sampled") continue;
    const sample = data as unknown as Sample;
    found.set(`${sample.step} ${sample.prompt}`, sample);
  }
  return [...found.values()].sort((a, b) => b.step - a.step);
}
