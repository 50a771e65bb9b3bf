import { Group, Text } from "@mantine/core";

import type { Live } from "../api/useLiveRefresh";
import { ago } from "../format";
import { useNow } from "../useNow";
import classes from "./LiveMark.module.css";

/** Says whether what is on screen is current, and since when not. */
export function LiveMark({ live }: { live: Live }) {
  const now = useNow(live.state === "lost");
  const words = { connecting: "Connecting", live: "Live", lost: "Reconnecting" }[live.state];
  return (
    <Group gap={6} wrap="nowrap" role="status">
      <span className={classes.dot} data-state={live.state} aria-hidden />
      <Text size="sm" c="dimmed" truncate>
        {words}
        {live.state === "lost" && live.lastHeard !== null && ` · last heard ${ago(live.lastHeard, now)}`}
      </Text>
    </Group>
  );
}
