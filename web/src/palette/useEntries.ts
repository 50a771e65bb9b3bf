/** Entries of the command palette: pages, actions, jobs, machines and deployments. */
import { useComputedColorScheme, useMantineColorScheme } from "@mantine/core";
import { keepPreviousData, useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useLocation, useNavigate } from "@tanstack/react-router";
import { useTranslation } from "react-i18next";

import { cluster, deployments, jobs } from "../api/queries";
import { may, type Scope } from "../api/scopes";
import { signOut, type SignedInKey } from "../api/session";
import { isGone } from "../api/types";
import { chooseDensity, useDensity } from "../density";
import { choose, LANGUAGES } from "../i18n";
import { canNotify, switchOff, switchOn, useWatching, watch } from "../notifications/watching";
import { isJobId, matching } from "./find";

export interface Entry {
  id: string;
  label: string;
  also?: string;
  /** Shown beside the label. */
  detail?: string;
  run: () => unknown;
}

interface EntryGroup {
  id: string;
  title: string;
  entries: Entry[];
}

/**
 * Maximum number of entries of each kind (jobs, machines, deployments); fewer, only the newest, without a search text.
 */
const MOST = 8;
const MOST_UNASKED = 3;

/** Groups of entries that match `text`. Jobs are requested by `searched`, which follows `text` after a pause. */
export function useEntries(signedIn: SignedInKey, text: string, searched: string): EntryGroup[] {
  const { t, i18n } = useTranslation();
  const navigate = useNavigate();
  const path = useLocation({ select: ({ pathname }) => pathname });
  const { setColorScheme } = useMantineColorScheme();
  const scheme = useComputedColorScheme("light") === "light" ? "dark" : "light";
  const isCompact = useDensity() === "compact";
  const { isOn, jobs: watched } = useWatching();
  const isReader = may(signedIn, "read");
  const found = useInfiniteQuery({
    ...jobs(searched.trim() === "" ? {} : { name: searched.trim() }),
    enabled: isReader,
    placeholderData: keepPreviousData,
  });
  const machines = useQuery({ ...cluster, enabled: isReader });
  const served = useInfiniteQuery({ ...deployments("up"), enabled: isReader });

  const allowed = (entries: (Entry & { scope?: Scope })[]) => entries.filter(({ scope = "read" }) => may(signedIn, scope));
  const pages = allowed([
    { id: "/", label: t("Machines"), also: "Machines", run: () => navigate({ to: "/" }) },
    { id: "/jobs", label: t("Jobs"), also: "Jobs", run: () => navigate({ to: "/jobs" }) },
    { id: "/models", label: t("Models"), also: "Models deployments", run: () => navigate({ to: "/models" }) },
    { id: "/playground", label: t("Playground"), also: "Playground chat", scope: "chat", run: () => navigate({ to: "/playground" }) },
    { id: "/admin", label: t("Admin"), also: "Admin alerts queue keys server", run: () => navigate({ to: "/admin" }) },
  ]);
  const openJob = /^\/jobs\/([^/]+)$/.exec(path)?.[1];
  const next = i18n.language === "zh" ? "en" : "zh";
  const actions = allowed([
    { id: "submit", label: t("Submit a job"), also: "Submit train", scope: "submit", run: () => navigate({ to: "/submit" }) },
    { id: "invite", label: t("Invite a machine"), also: "Invite join", scope: "admin", run: () => navigate({ to: "/invites" }) },
    ...(isReader && openJob !== undefined
      ? [
          {
            id: "watch",
            label: watched.includes(openJob) ? t("Stop watching this job") : t("Watch this job: notify me when it ends"),
            also: "Watch notify",
            run: async () => {
              const isNew = !watched.includes(openJob);
              watch(openJob, isNew);
              if (isNew && !isOn) await switchOn();
            },
          },
        ]
      : []),
    ...(canNotify()
      ? [
          {
            id: "notify",
            label: isOn ? t("Stop notifying me when my jobs end") : t("Notify me when my jobs end"),
            also: "Notifications",
            run: () => (isOn ? switchOff() : switchOn()),
          },
        ]
      : []),
    {
      id: "scheme",
      label: scheme === "dark" ? t("Use the dark colours") : t("Use the light colours"),
      also: "dark light theme",
      scope: "chat",
      run: () => setColorScheme(scheme),
    },
    {
      id: "density",
      label: isCompact ? t("Show tables and cards comfortably") : t("Show tables and cards compactly"),
      also: "density compact comfortable",
      scope: "chat",
      run: () => chooseDensity(isCompact ? "comfortable" : "compact"),
    },
    { id: "language", label: LANGUAGES[next], also: "language English 中文", scope: "chat", run: () => choose(next) },
    { id: "sign-out", label: t("Sign out"), also: "Sign out", scope: "chat", run: () => signOut() },
  ]);
  const most = text.trim() === "" ? MOST_UNASKED : MOST;
  const ofJobs = (found.data?.pages ?? [])
    .flatMap((page) => page.jobs)
    .map(
      (job): Entry => ({
        id: job.id,
        label: job.name,
        also: job.id,
        detail: t(job.state),
        run: () => navigate({ to: "/jobs/$jobId", params: { jobId: job.id } }),
      }),
    );
  // A pasted id may belong to a job that is not loaded.
  const id = text.trim().toLowerCase();
  if (isReader && isJobId(id) && !ofJobs.some((job) => job.id === id)) {
    ofJobs.unshift({ id, label: t("Open job {{id}}", { id }), run: () => navigate({ to: "/jobs/$jobId", params: { jobId: id } }) });
  }
  const ofMachines = (machines.data?.machines ?? [])
    .filter((machine) => !isGone(machine))
    .map(
      (machine): Entry => ({
        id: machine.id,
        label: machine.name,
        also: `${machine.id} ${machine.owner ?? ""}`,
        detail: machine.held === null ? t(machine.state) : machine.held.name,
        run: () => navigate({ to: "/machines/$machineId", params: { machineId: machine.id } }),
      }),
    );
  const ofDeployments = (served.data?.pages ?? [])
    .flatMap((page) => page.deployments)
    .map(
      (one): Entry => ({
        id: one.id,
        label: one.name,
        also: one.id,
        detail: t(one.state),
        run: () => navigate({ to: "/deployments/$name", params: { name: one.name } }),
      }),
    );
  return [
    { id: "pages", title: t("Pages"), entries: matching(pages, text) },
    { id: "actions", title: t("Actions"), entries: matching(actions, text) },
    { id: "jobs", title: t("Jobs"), entries: matching(ofJobs, text).slice(0, most) },
    { id: "machines", title: t("Machines"), entries: matching(ofMachines, text).slice(0, most) },
    { id: "deployments", title: t("Deployments"), entries: matching(ofDeployments, text).slice(0, most) },
  ].filter(({ entries }) => entries.length > 0);
}
