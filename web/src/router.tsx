import { createRootRoute, createRoute, createRouter } from "@tanstack/react-router";

import { pageNotLoaded } from "./api/problem";
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
import { isLoadFailure, lazyPage } from "./lazy";

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
  component: lazyPage(() => import("./pages/Machine"), "Machine"),
});

const jobs = createRoute({
  getParentRoute: () => root,
  path: "/jobs",
  validateSearch: runsSearch,
  component: lazyPage(() => import("./pages/Jobs"), "Jobs"),
});

const job = createRoute({
  getParentRoute: () => root,
  path: "/jobs/$jobId",
  validateSearch: jobSearch,
  component: lazyPage(() => import("./pages/Job"), "Job"),
});

const compare = createRoute({
  getParentRoute: () => root,
  path: "/compare",
  validateSearch: compareSearch,
  component: lazyPage(() => import("./pages/Compare"), "Compare"),
});

const submit = createRoute({
  getParentRoute: () => root,
  path: "/submit",
  validateSearch: (search): { from?: string; start?: Start | undefined; view?: "yaml" | undefined } => ({
    ...(typeof search.from === "string" && { from: search.from }),
    ...(START_NAMES.some((name) => name === search.start) && { start: search.start as Start }),
    ...(search.view === "yaml" && { view: "yaml" }),
  }),
  component: lazyPage(() => import("./pages/Submit"), "Submit"),
});

const models = createRoute({
  getParentRoute: () => root,
  path: "/models",
  validateSearch: modelsSearch,
  component: lazyPage(() => import("./pages/Models"), "Models"),
});

const deployment = createRoute({
  getParentRoute: () => root,
  path: "/deployments/$name",
  component: lazyPage(() => import("./pages/Deployment"), "Deployment"),
});

const playground = createRoute({
  getParentRoute: () => root,
  path: "/playground",
  // Names are separated by commas, so that users can type the URL by hand.
  validateSearch: (search): { with?: string } => (search.with === undefined ? {} : { with: String(search.with) }),
  component: lazyPage(() => import("./pages/Playground"), "Playground"),
});

const invites = createRoute({
  getParentRoute: () => root,
  path: "/invites",
  component: lazyPage(() => import("./pages/Invites"), "Invites"),
});

const admin = createRoute({
  getParentRoute: () => root,
  path: "/admin",
  component: lazyPage(() => import("./pages/Admin"), "Admin"),
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
  // A new start, because code that failed to load remains failed.
  defaultErrorComponent: ({ error }) => <Failure error={shown(error)} retry={() => location.reload()} />,
});

function shown(error: unknown): Error {
  if (!(error instanceof Error)) return new Error(String(error));
  return isLoadFailure(error) ? pageNotLoaded() : error;
}

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
