import { createRootRoute, createRoute, createRouter, lazyRouteComponent } from "@tanstack/react-router";

import { Failure, Loading } from "./components/Feedback";
import { Shell } from "./components/Shell";
import { NotFound } from "./pages/NotFound";
import { JOB_STATES, type JobState } from "./api/types";

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
  component: lazyRouteComponent(() => import("./pages/Submit"), "Submit"),
});

const invites = createRoute({
  getParentRoute: () => root,
  path: "/invites",
  component: lazyRouteComponent(() => import("./pages/Invites"), "Invites"),
});

const operations = createRoute({
  getParentRoute: () => root,
  path: "/operations",
  component: lazyRouteComponent(() => import("./pages/Operations"), "Operations"),
});

export const router = createRouter({
  routeTree: root.addChildren([pool, jobs, job, submit, invites, operations]),
  defaultPreload: "intent",
  defaultPendingComponent: Loading,
  defaultErrorComponent: ({ error, reset }) => <Failure error={error instanceof Error ? error : new Error(String(error))} retry={reset} />,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
