import { Text, UnstyledButton } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Deployment } from "../../api/types";
import classes from "./Playground.module.css";

interface Props {
  offered: readonly Deployment[];
  chosen: readonly string[];
  /** Maximum number of models that can be chosen. */
  most: number;
  onChange: (names: string[]) => void;
}

/** Chooses the models. Chosen models that are not up are listed, too, because their names are in the URL. */
export function ModelPicker({ offered, chosen, most, onChange }: Props) {
  const { t } = useTranslation();
  const gone = chosen.filter((name) => !offered.some((one) => one.name === name));
  return (
    <div role="group" aria-label={t("Models")} className={classes.models}>
      {[...offered.map(({ name, state }) => ({ name, state })), ...gone.map((name) => ({ name, state: "gone" as const }))].map(
        ({ name, state }) => {
          const isChosen = chosen.includes(name);
          return (
            <UnstyledButton
              key={name}
              className={classes.model}
              aria-pressed={isChosen}
              disabled={!isChosen && chosen.length >= most}
              onClick={() => onChange(isChosen ? chosen.filter((one) => one !== name) : [...chosen, name])}
            >
              <span className={classes.dot} data-state={state} aria-hidden />
              {name}
              {state !== "ready" && <span className={classes.state}>{state === "gone" ? t("not up") : t(state)}</span>}
            </UnstyledButton>
          );
        },
      )}
      {offered.length > 1 && (
        <Text size="xs" c="dimmed">
          {t("up to {{most}} side by side", { most })}
        </Text>
      )}
    </div>
  );
}
