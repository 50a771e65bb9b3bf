import { Button, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useMemo, useState } from "react";
import { useTranslation } from "react-i18next";

import { log } from "../../../api/queries";
import type { ClusterEvent } from "../../../api/types";
import { Section } from "../../../components/frame/Page";
import { count } from "../../../format";
import classes from "./Samples.module.css";

const SHOWN = 4;

interface Sample {
  step: number;
  prompt: string;
  text: string;
}

/** Texts that the model generated during training, newest first; empty if none were requested. */
export function Samples({ jobId }: { jobId: string }) {
  const { t } = useTranslation();
  const { data } = useQuery(log(jobId));
  const [isWhole, setWhole] = useState(false);
  const samples = useMemo(() => samplesIn(data ?? []), [data]);
  if (samples.length === 0) return null;
  const shown = isWhole ? samples : samples.slice(0, SHOWN);
  return (
    <Section title={t("Samples")}>
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
    </Section>
  );
}

/** Samples by step, newest first. A resumed attempt repeats some; the later one replaces the earlier. */
export function samplesIn(events: readonly ClusterEvent[]): Sample[] {
  const found = new Map<string, Sample>();
  for (const { kind, data } of events) {
    if (kind !== "sampled") continue;
    const sample = data as unknown as Sample;
    found.set(`${sample.step} ${sample.prompt}`, sample);
  }
  return [...found.values()].sort((a, b) => b.step - a.step);
}
