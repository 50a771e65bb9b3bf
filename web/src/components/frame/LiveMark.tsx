import { Group, Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Live } from "../../api/events/useLiveRefresh";
import { ago } from "../../format";
import { useNow } from "../../useNow";
import classes from "./LiveMark.module.css";

/** Shows whether the data on screen is current, and if not, since when. */
export function LiveMark({ live }: { live: Live }) {
  const now = useNow(live.state === "lost");
  const { t } = useTranslation();
  const words = { connecting: t("Connecting"), live: t("Live"), lost: t("Reconnecting") }[live.state];
  return (
    <Group gap={6} wrap="nowrap" role="status">
      <span className={classes.dot} data-state={live.state} aria-hidden />
      <Text size="sm" c="dimmed" truncate className={classes.words} data-state={live.state}>
        {words}
        {live.state === "lost" && live.lastConnected !== null && ` · ${t("last heard {{when}}", { when: ago(live.lastConnected, now) })}`}
      </Text>
    </Group>
  );
}
