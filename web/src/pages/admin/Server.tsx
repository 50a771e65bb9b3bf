import { Text } from "@mantine/core";
import { useTranslation } from "react-i18next";

import type { Status } from "../../api/types";
import { bytes, dateAndTime } from "../../format";
import classes from "./Server.module.css";
import { PARTS } from "./versions";

/** Facts about the server, as shown by `share-compute status` and `share-compute config`. */
export function Server({ server }: { server: Status }) {
  const { t } = useTranslation();
  const noHead = t("none: machines cannot join, and jobs wait");
  // The server reports the address of the head to admins only.
  const rayHead: [string, string][] =
    server.ray_address != null || !server.has_cluster ? [[t("Ray head"), server.ray_address ?? noHead]] : [];
  const facts: [string, string][] = [
    [t("Address"), server.url],
    [t("Running since"), dateAndTime(server.started_at)],
    [t("Versions"), PARTS.map(([part, name]) => `${name} ${server.versions[part]}`).join(" · ")],
    ...rayHead,
    [t("Database"), { sqlite: "SQLite", postgresql: "PostgreSQL" }[server.database]],
    [
      t("Data folder"),
      server.data_folder == null
        ? t("{{size}} free", { size: bytes(server.disk_free_bytes) })
        : t("{{folder}} ({{size}} free)", { folder: server.data_folder, size: bytes(server.disk_free_bytes) }),
    ],
    [t("Jobs may name files below"), server.data_roots.join(", ") || t("no folder; files must be uploaded")],
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
