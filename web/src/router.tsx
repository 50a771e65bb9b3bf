import { createRootRoute, createRoute, createRouter, lazyRouteComponent } from "@tanstack/react-router";

import { Failure, Loading } from "./components/Feedback";
import { Shell } from "./components/Shell";
import { NotFound } from "./pages/NotFound";
import { machineSearch } from "./pages/machine/search";
import { poolSearch } from "./pool/search";
import { JOB_STATES, type JobState } from "./api/types";

const root = createRootRoute({ component: Shell, notFoundComponent: NotFound });

const pool = createRoute({
  getParentRoute: () => root,
  path: "/",
  validateSearch: poolSearch,
  component: lazyRouteComponent(() => import("./pages/Pool"), "Pool"),
});

const machine = createRoute({
  getParentRoute: () => root,
  path: "/machines/$machineId",
  validateSearch: machineSearch,
  component: lazyRouteComponent(() => import("./pages/Machine"), "Machine"),
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

export const router = createRouter({
  routeTree: root.addChildren([pool, machine, jobs, job, submit, invites]),
  defaultPreload: "intent",
  defaultPendingComponent: Loading,
  defaultErrorComponent: ({ error, reset }) => <Failure error={error instanceof Error ? error : new Error(String(error))} retry={reset} />,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
