/** Shows a browser notification when a job ends, if the session's key owns the job or the user watches it. */
import { useQueryClient } from "@tanstack/react-query";
import { useRouter } from "@tanstack/react-router";
import { useEffect } from "react";
import { useTranslation } from "react-i18next";

import { subscribe } from "../api/events/eventListeners";
import { job as jobQuery } from "../api/queries";
import { currentSession } from "../api/session";
import type { ClusterEvent, Job } from "../api/types";
import { translated } from "../i18n/texts";
import { useWatching, watching } from "./watching";

const ENDED = new Set(["succeeded", "failed", "cancelled"]);

/** Whether an event says that a job has ended. */
export function isEnd(event: Pick<ClusterEvent, "kind" | "data">): boolean {
  return event.kind === "state" && ENDED.has(String(event.data.state));
}

/** Trials are reported by their sweep. */
export function concerns(job: Pick<Job, "id" | "owner" | "sweep_id">, key: string, watched: readonly string[]): boolean {
  return watched.includes(job.id) || (job.owner === key && job.sweep_id == null);
}

export function useJobNotifications(): void {
  const client = useQueryClient();
  const router = useRouter();
  const { t } = useTranslation();
  const { isOn } = useWatching();
  useEffect(() => {
    if (!isOn) return undefined;
    const show = async (id: string, state: string, reason: string) => {
      const job = await client.fetchQuery(jobQuery(id));
      const session = currentSession();
      if (session.state !== "in" || !concerns(job, session.key.id, watching().jobs)) return;
      if (Notification.permission !== "granted") return;
      // The tag prevents several tabs from each showing a notification.
      const shown = new Notification(`${job.name}: ${t(state)}`, { body: translated(reason), tag: id, icon: "/icon.svg" });
      shown.onclick = () => {
        focus();
        shown.close();
        void router.navigate({ to: "/jobs/$jobId", params: { jobId: id } });
      };
    };
    return subscribe((event) => {
      if (event.job_id === null || !isEnd(event)) return;
      // A job that was deleted in the meantime needs no notification.
      show(event.job_id, String(event.data.state), String(event.data.reason ?? "")).catch(() => undefined);
    });
  }, [isOn, client, router, t]);
}
