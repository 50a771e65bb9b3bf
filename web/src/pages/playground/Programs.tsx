/** The last request as a program, for each chosen model. */
import { SegmentedControl, Stack, Text } from "@mantine/core";
import { useState } from "react";
import { useTranslation } from "react-i18next";

import type { Served } from "../../talk/conversation";
import { chatRequest, plainRequest } from "../../talk/requests";
import type { Settings, Turn } from "../../talk/types";
import { Snippets } from "../deployment/Snippets";
import type { Route } from "../deployment/snippet";
import classes from "./Playground.module.css";

const PROMPT = "Sing of the sea.";

interface Props {
  models: readonly string[];
  turns: readonly Turn[];
  settings: Settings;
  served: Served;
}

/** While closed, it does not render the conversation, which grows while answers are generated. */
export function Programs(props: Props) {
  const { t } = useTranslation();
  const [isOpen, setOpen] = useState(false);
  return (
    <details className={`card ${classes.parameters}`} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{t("The same with curl or Python")}</summary>
      {isOpen && <Program {...props} />}
    </details>
  );
}

function Program({ models, turns, settings, served }: Props) {
  const { t } = useTranslation();
  const [wanted, setWanted] = useState<string>();
  const model = models.find((one) => one === wanted) ?? models[0]!;
  const request = (route: Route): Record<string, unknown> => {
    const [before, prompt] = [turns.slice(0, -1), turns.at(-1)?.prompt ?? PROMPT];
    const { seed: _, ...body } =
      route === "chat/completions"
        ? chatRequest(model, before, prompt, settings, 0)
        : plainRequest(model, before, prompt, settings, 0, served.get(model)?.max_model_len);
    return settings.seed === undefined ? body : { ...body, seed: settings.seed };
  };
  return (
    <Stack gap="sm" mt="sm">
      <Text size="sm" c="dimmed">
        {t("This conversation up to its last message, with these parameters.")}
      </Text>
      {models.length > 1 && (
        <div>
          <SegmentedControl aria-label={t("Model of the program")} value={model} onChange={setWanted} data={[...models]} />
        </div>
      )}
      <Snippets name={model} request={request} />
    </Stack>
  );
}
