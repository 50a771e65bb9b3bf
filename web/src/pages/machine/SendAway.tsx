/** Drains a machine, after a confirmation. */
import { useQueryClient } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { fetchAgain } from "../../api/fetchAgain";
import { contributors, machine as machineQuery } from "../../api/queries";
import { useMay } from "../../api/scopes";
import { ConfirmButton } from "../../components/ConfirmButton";

interface Props {
  machine: { id: string; name: string };
  /** See `ConfirmButton`. */
  label?: string;
  /** Explains the consequences. */
  children: ReactNode;
}

export function SendAway({ machine: { id, name }, children, ...rest }: Props) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const isAdmin = useMay("admin");
  if (!isAdmin) return null;
  return (
    <ConfirmButton
      {...rest}
      action={t("Send away")}
      question={t("Send {{name}} away?", { name })}
      onConfirm={async () => {
        await body(api.DELETE("/api/v1/contributors/{contributor_id}", { params: { path: { contributor_id: id } } }));
        await Promise.all([
          fetchAgain(client, { queryKey: contributors.queryKey }),
          fetchAgain(client, { queryKey: machineQuery(id).queryKey, exact: true }),
        ]);
      }}
    >
      {children}
    </ConfirmButton>
  );
}
