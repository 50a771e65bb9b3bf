import { VisuallyHidden } from "@mantine/core";
import { useTranslation } from "react-i18next";

import { joined } from "../../placement/layout";
import type { Answer, Turn } from "../../talk/types";

/** Announces the state of the last answers to screen readers; it does not read a growing text token by token. */
export function Announcer({ turns }: { turns: readonly Turn[] }) {
  const { t } = useTranslation();
  const say = ({ model, state, marks }: Answer): string => {
    const lost = marks.at(-1);
    if (lost?.seconds === null && (state === "waiting" || state === "writing")) {
      return t("{{model}} pauses: {{names}} lost", { model, names: joined(lost.machines) });
    }
    switch (state) {
      case "waiting":
      case "writing":
        return t("{{model}} answers", { model });
      case "done":
        return t("{{model}} has answered", { model });
      case "stopped":
        return t("{{model}} was stopped", { model });
      case "broken":
        return t("the answer of {{model}} broke off", { model });
      case "failed":
        return t("{{model}} did not answer", { model });
    }
  };
  return (
    <VisuallyHidden role="status">{turns.at(-1)?.answers.map(say).join("; ") ?? ""}</VisuallyHidden>
  );
}
