/** The state of the whole server for every key that may read: alerts, queue, machines, deployments; keys for admins. */
import { SimpleGrid } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { useAlerts } from "../alerts/useAlerts";
import { alerts, contributors, status } from "../api/queries";
import { useMay } from "../api/scopes";
import { Waiting } from "../components/Feedback";
import { Page, Section } from "../components/frame/Page";
import { Alerts } from "./admin/Alerts";
import { Deployments } from "./admin/Deployments";
import { Keys } from "./admin/Keys";
import { Machines } from "./admin/Machines";
import { deployments, keys, queue } from "./admin/queries";
import { Queue } from "./admin/Queue";
import { Server } from "./admin/Server";

export function Admin() {
  const { t } = useTranslation();
  const server = useQuery(status);
  const matters = useQuery(alerts);
  const known = useAlerts(true);
  const [waiting, served] = [useQuery(queue), useQuery(deployments)];
  const isAdmin = useMay("admin");
  return (
    <Page title={t("Admin")}>
      <Part title={t("Alerts")} query={matters}>
        {() => <Alerts alerts={known} />}
      </Part>
      <SimpleGrid cols={{ base: 1, md: waiting.data?.length === 0 && served.data?.length === 0 ? 2 : 1 }} spacing="lg">
        <Part title={t("Queue of jobs")} query={waiting}>
          {(jobs) => <Queue jobs={jobs} />}
        </Part>
        <Part title={t("Deployments")} query={served}>
          {(found) => <Deployments deployments={found} />}
        </Part>
      </SimpleGrid>
      <Part title={t("Machines")} query={useQuery(contributors)}>
        {(machines) => <Machines machines={machines} alerts={matters.data ?? []} versions={server.data?.versions} />}
      </Part>
      <Part title={t("Server")} query={server}>
        {(found) => <Server server={found} />}
      </Part>
      {isAdmin && <KeysPart />}
    </Page>
  );
}

function KeysPart() {
  const { t } = useTranslation();
  return (
    <Part title={t("API keys")} query={useQuery(keys)}>
      {(found) => <Keys keys={found} />}
    </Part>
  );
}

interface PartProps<T> {
  title: string;
  query: { data: T | undefined; error: Error | null; refetch: () => unknown };
  children: (data: T) => ReactNode;
}

/** One part of the page; each part loads and fails independently. */
function Part<T>({ title, query: { data, error, refetch }, children }: PartProps<T>) {
  return (
    <Section title={title}>
      {data !== undefined ? children(data) : <Waiting error={error} refetch={refetch} lines={2} />}
    </Section>
  );
}
