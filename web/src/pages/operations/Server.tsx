import { Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Status } from "../../api/types";
import { bytes, dateAndTime } from "../../format";
import classes from "./Server.module.css";
import { PARTS } from "./versions";

/** The server itself, as `share-compute status` and `share-compute config` tell it. */
export function Server({ server }: { server: Status }) {
  const { t } = useTranslation();
  const facts: [string, string][] = [
    [t("Address"), server.url],
    [t("Running since"), dateAndTime(server.started_at)],
    [t("Versions"), PARTS.map(([part, name]) => `${name} ${server.versions[part]}`).join(" · ")],
    [t("Ray head"), server.ray_address ?? t("none: machines cannot join, and jobs wait")],
    [t("Database"), { sqlite: "SQLite", postgresql: "PostgreSQL" }[server.database]],
    [t("Data folder"), t("{{folder}} ({{size}} free)", { folder: server.data_folder, size: bytes(server.disk_free_bytes) })],
  ];
  return (
    <dl className={classes.facts}>
      {facts.map(([name, value]) => (
        <div key={name} className={classes.fact}>
          <Text component="dt" size="sm" c="dimmed">
            {name}
          </Text>
          <Text component="dd" size="sm">
            {value}
          </Text>
        </div>
      ))}
    </dl>
  );
}
