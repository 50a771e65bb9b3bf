import { createRootRoute, createRoute, createRouter, lazyRouteComponent } from "@tanstack/react-router";

import { Failure, Loading } from "./components/Feedback";
import { Shell } from "./components/frame/Shell";
import { NotFound } from "./pages/NotFound";
import { jobSearch } from "./pages/job/search";
import { compareSearch, runsSearch } from "./pages/runs/search";
import { machineSearch } from "./pages/machine/search";
import { modelsSearch } from "./pages/models/search";
import { Cluster } from "./pages/Cluster";
import type { Start } from "./pages/submit/starts/starts";
import { clusterSearch } from "./cluster/search";

/** Names of the examples; their texts are loaded with the page. */
const START_NAMES = ["digits", "language", "generate", "embed", "sweep", "serve"] as const satisfies readonly Start[];

const root = createRootRoute({ component: Shell, notFoundComponent: NotFound });

// Bundled with the frame, because most users open this page first; it needs no further requests.
const cluster = createRoute({
  getParentRoute: () => root,
  path: "/",
  validateSearch: clusterSearch,
  component: Cluster,
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
  validateSearch: runsSearch,
  component: lazyRouteComponent(() => import("./pages/Jobs"), "Jobs"),
});

const job = createRoute({
  getParentRoute: () => root,
  path: "/jobs/$jobId",
  validateSearch: jobSearch,
  component: lazyRouteComponent(() => import("./pages/Job"), "Job"),
});

const compare = createRoute({
  getParentRoute: () => root,
  path: "/compare",
  validateSearch: compareSearch,
  component: lazyRouteComponent(() => import("./pages/Compare"), "Compare"),
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

const models = createRoute({
  getParentRoute: () => root,
  path: "/models",
  validateSearch: modelsSearch,
  component: lazyRouteComponent(() => import("./pages/Models"), "Models"),
});

const deployment = createRoute({
  getParentRoute: () => root,
  path: "/deployments/$name",
  component: lazyRouteComponent(() => import("./pages/Deployment"), "Deployment"),
});

const playground = createRoute({
  getParentRoute: () => root,
  path: "/playground",
  // Names are separated by commas, so that users can type the URL by hand.
  validateSearch: (search): { with?: string } => (search.with === undefined ? {} : { with: String(search.with) }),
  component: lazyRouteComponent(() => import("./pages/Playground"), "Playground"),
});

const invites = createRoute({
  getParentRoute: () => root,
  path: "/invites",
  component: lazyRouteComponent(() => import("./pages/Invites"), "Invites"),
});

const admin = createRoute({
  getParentRoute: () => root,
  path: "/admin",
  component: lazyRouteComponent(() => import("./pages/Admin"), "Admin"),
});

export const router = createRouter({
  routeTree: root.addChildren([
    cluster,
    machine,
    jobs,
    job,
    compare,
    models,
    deployment,
    playground,
    submit,
    invites,
    admin,
  ]),
  defaultPreload: "intent",
  defaultPendingComponent: Loading,
  defaultErrorComponent: ({ error, reset }) => <Failure error={error instanceof Error ? error : new Error(String(error))} retry={reset} />,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
