/** Lifts the quarantine of a machine that sent wrong numbers, after a confirmation. */
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { MachineButton } from "./MachineButton";

export function Clear({ machine: { id, name } }: { machine: { id: string; name: string } }) {
  const { t } = useTranslation();
  return (
    <MachineButton
      id={id}
      action={t("End quarantine")}
      question={t("Give {{name}} work again?", { name })}
      change={() => body(api.DELETE("/api/v1/contributors/{contributor_id}/quarantine", { params: { path: { contributor_id: id } } }))}
    >
      {t("It sent wrong numbers. Check its memory and its software first.")}
    </MachineButton>
  );
}
