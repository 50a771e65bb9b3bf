/** Requests a new measurement of a machine, which starts when all machines of the host are free. */
import { Button, Text } from "@mantine/core";
import { useMutation } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { api, body } from "../../api/client";
import { useMay } from "../../api/scopes";
import { isGone, type Machine } from "../../api/types";
import { Failure } from "../../components/Feedback";

export function Measure({ machine }: { machine: Machine }) {
  const { t } = useTranslation();
  const isAdmin = useMay("admin");
  const asking = useMutation({
    mutationFn: () =>
      body(api.POST("/api/v1/contributors/{contributor_id}/measurement", { params: { path: { contributor_id: machine.id } } })),
  });
  if (!isAdmin || isGone(machine)) return null;
  return (
    <div aria-live="polite">
      {asking.error !== null ? (
        <Failure error={asking.error} retry={() => asking.mutate()} />
      ) : asking.isSuccess ? (
        <Text size="sm" c="dimmed">
          {t("It is measured as soon as all machines of its host are free.")}
        </Text>
      ) : (
        <Button size="compact-sm" variant="default" loading={asking.isPending} onClick={() => asking.mutate()}>
          {t("Measure again")}
        </Button>
      )}
    </div>
  );
}
