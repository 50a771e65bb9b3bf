import { Alert, Group, Stack, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useTranslation } from "react-i18next";

import { fieldProblems } from "../../api/problem";
import { log } from "../../api/queries";
import { useMay } from "../../api/scopes";
import type { Job } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { ButtonLink } from "../../components/links";
import { MachineLink } from "../../components/MachineLink";
import { translated } from "../../i18n/texts";
import { lostDuring, type Members } from "./members";

/** The reason of the failure, the affected fields or machine, the hint, and a way to resubmit the job. */
export function Failed({ job, members }: { job: Job; members: Members }) {
  const { t } = useTranslation();
  const maySubmit = useMay("submit");
  const { hint, machine, details } = job.error ?? {};
  const isNamed = typeof machine === "string";
  const { data: events } = useQuery({ ...log(job.id), enabled: !isNamed });
  const concerned = isNamed ? members.filter(({ id, name }) => id === machine || name === machine) : [];
  const lost = isNamed ? [] : lostDuring(job, events ?? []);
  const fields = fieldProblems((details as { fields?: unknown } | undefined)?.fields);
  return (
    <Alert className="failure" title={sentence(job.reason)}>
      <Stack gap="xs">
        {fields.map(({ field, problem }) => (
          <Text key={field} size="sm">
            <code>{field}</code>: {problem}
          </Text>
        ))}
        {isNamed && concerned.length === 0 && (
          <Text size="sm">
            {t("Machine")}: {machine}
          </Text>
        )}
        {concerned.map(({ id, name, state, reason }) => (
          <Text key={id} size="sm">
            {t("Machine")}: <MachineLink id={id} name={name} fw={600} /> · {t(state)}: {translated(reason)}
          </Text>
        ))}
        {lost.map(({ id, name }) => (
          <Text key={id} size="sm">
            {t("Machine")}: <MachineLink id={id} name={name} fw={600} /> · {t("lost")}
          </Text>
        ))}
        <Group justify="space-between" gap="sm">
          <Text size="sm">{typeof hint === "string" && sentence(hint)}</Text>
          {maySubmit && (
            <ButtonLink size="xs" to="/submit" search={{ from: job.id }}>
              {t("Fix and resubmit")}
            </ButtonLink>
          )}
        </Group>
      </Stack>
    </Alert>
  );
}
