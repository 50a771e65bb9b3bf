/** Overview for operators: alerts, the queue, machines, deployments, keys and the server. */
import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";
import { useTranslation } from "react-i18next";

import { contributors, status } from "../api/queries";
import { useMay } from "../api/scopes";
import { Waiting } from "../components/Feedback";
import { Page, Section } from "../components/frame/Page";
import { Alerts } from "./operations/Alerts";
import { Deployments } from "./operations/Deployments";
import { Keys } from "./operations/Keys";
import { Machines } from "./operations/Machines";
import { alerts, deployments, keys, queue } from "./operations/queries";
import { Queue } from "./operations/Queue";
import { Server } from "./operations/Server";

export function Operations() {
  const { t } = useTranslation();
  const server = useQuery(status);
  const matters = useQuery(alerts);
  const isAdmin = useMay("admin");
  return (
    <Page title={t("Operations")}>
      <Part title={t("Alerts")} query={matters}>
        {(found) => <Alerts alerts={found} />}
      </Part>
      <Part title={t("Queue of jobs")} query={useQuery(queue)}>
        {(jobs) => <Queue jobs={jobs} />}
      </Part>
      <Part title={t("Deployments")} query={useQuery(deployments)}>
        {(found) => <Deployments deployments={found} />}
      </Part>
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

/** One part of the page; each loads and fails independently. */
function Part<T>({ title, query: { data, error, refetch }, children }: PartProps<T>) {
  return (
    <Section title={title}>
      {data !== undefined ? children(data) : <Waiting error={error} refetch={refetch} lines={2} />}
    </Section>
  );
}
