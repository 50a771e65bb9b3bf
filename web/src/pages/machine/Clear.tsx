/** Lifts the quarantine of a machine that sent wrong numbers, after a confirmation. */
import { useQueryClient } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { fetchAgain } from "../../api/fetchAgain";
import { contributors, machine as machineQuery } from "../../api/queries";
import { useMay } from "../../api/scopes";
import { ConfirmButton } from "../../components/ConfirmButton";

export function Clear({ machine: { id, name } }: { machine: { id: string; name: string } }) {
  const { t } = useTranslation();
  const client = useQueryClient();
  const isAdmin = useMay("admin");
  if (!isAdmin) return null;
  return (
    <ConfirmButton
      action={t("End quarantine")}
      question={t("Give {{name}} work again?", { name })}
      onConfirm={async () => {
        await body(
          api.DELETE("/api/v1/contributors/{contributor_id}/quarantine", { params: { path: { contributor_id: id } } }),
        );
        await Promise.all([
          fetchAgain(client, { queryKey: contributors.queryKey }),
          fetchAgain(client, { queryKey: machineQuery(id).queryKey, exact: true }),
        ]);
      }}
    >
      {t("It sent wrong numbers. Check its memory and its software first.")}
    </ConfirmButton>
  );
}
