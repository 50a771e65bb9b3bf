import { SimpleGrid, Stack, Text, Textarea, TextInput } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import type { Settings } from "../../talk/types";
import classes from "./Playground.module.css";

type Numbers = Exclude<keyof Settings, "system" | "stop">;

interface Props {
  settings: Settings;
  onChange: (settings: Settings) => void;
}

/** Sampling parameters. For empty ones the server uses its defaults, which are shown. */
export function Parameters({ settings, onChange }: Props) {
  const { t } = useTranslation();
  const numbers: { name: Numbers; label: string; hint: string; step: string; min?: number; max?: number }[] = [
    { name: "temperature", label: t("Temperature"), hint: "1", step: "0.1", min: 0, max: 2 },
    { name: "top_p", label: "top_p", hint: "1", step: "0.05", min: 0, max: 1 },
    { name: "top_k", label: "top_k", hint: t("all"), step: "1", min: 0 },
    { name: "min_p", label: "min_p", hint: "0", step: "0.05", min: 0, max: 1 },
    { name: "max_tokens", label: t("Most tokens"), hint: t("what the model holds"), step: "1", min: 1 },
    { name: "seed", label: t("Seed"), hint: t("random"), step: "1" },
  ];
  const changed = numbers.filter(({ name }) => settings[name] !== undefined).length;
  const set = (name: Numbers, text: string) => {
    const { [name]: _, ...rest } = settings;
    onChange(text.trim() === "" || Number.isNaN(Number(text)) ? rest : { ...rest, [name]: Number(text) });
  };
  const others = Number(settings.system !== "") + Number(settings.stop.length > 0);
  return (
    <details className={`card ${classes.parameters}`}>
      <summary>
        {t("Parameters")}
        {changed + others > 0 && (
          <Text component="span" size="sm" c="dimmed" ml="xs">
            {t("{{count}} set", { count: changed + others })}
          </Text>
        )}
      </summary>
      <Stack gap="md" mt="sm">
        <Textarea
          label={t("System prompt")}
          placeholder={t("none")}
          rows={2}
          value={settings.system}
          onChange={(event) => onChange({ ...settings, system: event.currentTarget.value })}
        />
        <SimpleGrid cols={{ base: 2, sm: 3, md: 6 }} spacing="sm">
          {numbers.map(({ name, label, hint, ...bounds }) => (
            <TextInput
              key={name}
              label={label}
              placeholder={hint}
              type="number"
              value={settings[name] ?? ""}
              onChange={(event) => set(name, event.currentTarget.value)}
              {...bounds}
            />
          ))}
        </SimpleGrid>
        <Stops stops={settings.stop} onChange={(stop) => onChange({ ...settings, stop })} />
      </Stack>
    </details>
  );
}

const MOST_STOPS = 16;

/** Stop strings, one per line; the text stays as typed while its lines are parsed. */
function Stops({ stops, onChange }: { stops: string[]; onChange: (stops: string[]) => void }) {
  const { t } = useTranslation();
  const [text, setText] = useState(stops.join("\n"));
  const type = (next: string) => {
    setText(next);
    onChange(next.split("\n").filter((line) => line !== "").slice(0, MOST_STOPS));
  };
  return (
    <Textarea
      label={t("Stop strings")}
      description={t("An answer ends before any of these; one on each line.")}
      placeholder={t("none")}
      rows={2}
      value={text}
      onChange={(event) => type(event.currentTarget.value)}
    />
  );
}
