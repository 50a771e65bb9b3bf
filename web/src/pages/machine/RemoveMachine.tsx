/** Removes a machine, after a confirmation. */
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { MachineButton } from "./MachineButton";

interface Props {
  machine: { id: string; name: string };
  /** See `ConfirmButton`. */
  label?: string;
  /** Explains the consequences. */
  children: ReactNode;
}

export function RemoveMachine({ machine: { id, name }, ...rest }: Props) {
  const { t } = useTranslation();
  return (
    <MachineButton
      {...rest}
      id={id}
      action={t("Remove")}
      question={t("Remove {{name}}?", { name })}
      change={() => body(api.DELETE("/api/v1/contributors/{contributor_id}", { params: { path: { contributor_id: id } } }))}
    />
  );
}
