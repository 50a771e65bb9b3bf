import { createRootRoute, createRoute, createRouter, lazyRouteComponent } from "@tanstack/react-router";

import { Failure, Loading } from "./components/Feedback";
import { Shell } from "./components/Shell";
import { NotFound } from "./pages/NotFound";
import type { Start } from "./pages/submit/starts";
import { JOB_STATES, type JobState } from "./api/types";

/** Examples that a job can be started from; their texts come with the page. */
const START_NAMES = ["digits", "language", "generate", "embed", "serve"] as const satisfies readonly Start[];

const root = createRootRoute({ component: Shell, notFoundComponent: NotFound });

const pool = createRoute({
  getParentRoute: () => root,
  path: "/",
  component: lazyRouteComponent(() => import("./pages/Pool"), "Pool"),
});

const jobs = createRoute({
  getParentRoute: () => root,
  path: "/jobs",
  validateSearch: (search): { state?: JobState } => {
    const state = JOB_STATES.find((known) => known === search.state);
    return state === undefined ? {} : { state };
  },
  component: lazyRouteComponent(() => import("./pages/Jobs"), "Jobs"),
});

const job = createRoute({
  getParentRoute: () => root,
  path: "/jobs/$jobId",
  component: lazyRouteComponent(() => import("./pages/Job"), "Job"),
});

const submit = createRoute({
  getParentRoute: () => root,
  path: "/submit",
  validateSearch: (search): { from?: string; start?: Start | undefined; view?: "yaml" | undefined } => ({
    ...(typeof search.from === "string" && { from: search.from }),
    ...(START_NAMES.some((name) => name === search.start) && { start: search.start as Start }),
    ...(search.view === "yaml" && { view: "yaml" }),
  }),
  component: lazyRouteComponent(() => import("./pages/Submit"), "Submit"),
});

const invites = createRoute({
  getParentRoute: () => root,
  path: "/invites",
  component: lazyRouteComponent(() => import("./pages/Invites"), "Invites"),
});

export const router = createRouter({
  routeTree: root.addChildren([pool, jobs, job, submit, invites]),
  defaultPreload: "intent",
  defaultPendingComponent: Loading,
  defaultErrorComponent: ({ error, reset }) => <Failure error={error instanceof Error ? error : new Error(String(error))} retry={reset} />,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
