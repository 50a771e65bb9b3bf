import { createRootRoute, createRoute, createRouter, lazyRouteComponent } from "@tanstack/react-router";

import { Failure, Loading } from "./components/Feedback";
import { Shell } from "./components/Shell";
import { NotFound } from "./pages/NotFound";
import { jobSearch, jobsSearch } from "./pages/job/search";

const root = createRootRoute({ component: Shell, notFoundComponent: NotFound });

const pool = createRoute({
  getParentRoute: () => root,
  path: "/",
  component: lazyRouteComponent(() => import("./pages/Pool"), "Pool"),
});

const jobs = createRoute({
  getParentRoute: () => root,
  path: "/jobs",
  validateSearch: jobsSearch,
  component: lazyRouteComponent(() => import("./pages/Jobs"), "Jobs"),
});

const job = createRoute({
  getParentRoute: () => root,
  path: "/jobs/$jobId",
  validateSearch: jobSearch,
  component: lazyRouteComponent(() => import("./pages/Job"), "Job"),
});

const submit = createRoute({
  getParentRoute: () => root,
  path: "/submit",
  // The job that the form begins with.
  validateSearch: (search): { from?: string } => (typeof search.from === "string" ? { from: search.from } : {}),
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
