import { Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Plan } from "../api/types";
import { MachineLink } from "../components/MachineLink";
import { translated } from "../i18n/texts";
import classes from "./Placement.module.css";

/** Machines that the plan does not use, with reasons. */
export function Idle({ machines }: { machines: Plan["idle"] }) {
  const { t } = useTranslation();
  if (machines.length === 0) return null;
  return (
    <div>
      <Text size="sm" fw={600}>
        {t("Without work")}
      </Text>
      <ul className={classes.idle}>
        {machines.map((machine) => (
          <li key={machine.contributor_id}>
            <Text size="sm" c="dimmed">
              <MachineLink id={machine.contributor_id} name={machine.name} fw={500} underline="always" />
              : {translated(machine.reason)}
            </Text>
          </li>
        ))}
      </ul>
    </div>
  );
}
