/** Short names for the schemas of the server's OpenAPI. */
import type { Readable } from "openapi-typescript-helpers";

import type { components } from "./schema";

/** The types that `openapi-fetch` returns. */
type Schemas = { [Name in keyof components["schemas"]]: Readable<components["schemas"][Name]> };

export type Checkpoint = Schemas["CheckpointEntry"];
export type Alert = Schemas["Alert"];
export type ApiKey = Schemas["ApiKeyRecord"];
export type Artifact = Schemas["ArtifactRecord"];
export type CatalogueEntry = Schemas["CatalogueEntry"];
export type Deployment = Schemas["DeploymentView"];
export type DeploymentState = Schemas["DeploymentState"];
export type DeploymentStatus = Schemas["DeploymentStatus"];
export type ReplicaStatus = Schemas["ServingStatus"];
export type BusyPoint = Schemas["BusyRecord"];
export type ClusterUtilization = Schemas["ClusterUtilization"];
export type UtilizationSample = Schemas["UtilizationSample"];
export type MachineUtilization = Schemas["MachineUtilization"];
export type Contributor = Schemas["ContributorRecord"];
export type ContributorList = Schemas["ContributorList"];
export type ContributorState = Schemas["ContributorState"];
export type MachineSummary = Schemas["MachineSummaryRecord"];
export type Held = Schemas["HeldRecord"];
export type Invite = Schemas["InviteView"];
export type Island = Schemas["Island"];
export type InviteCreated = Schemas["InviteCreated"];
export type Job = Schemas["JobRecord"];
export type SweepTrials = Schemas["SweepView"];
export type Trial = Schemas["TrialView"];
export type Comparison = Schemas["JobComparison"];
export type Picture = Schemas["Pictured"];
export type JobPage = Schemas["JobPage"];
export type LinkState = Schemas["LinkState"];
export type JobState = Schemas["JobState"];
export type Machine = Schemas["ContributorView"];
export type Measured = Schemas["Measured"];
export type Metric = Schemas["MetricRecord"];
export type Model = Schemas["Model"];
export type Plan = Schemas["Plan"];
export type PlanTimeline = Schemas["PlanTimeline"];
export type TimelineCell = Schemas["TimelineCell"];
export type Stage = Schemas["StagePlan"];
export type Branch = Schemas["BranchPlan"];
export type ClusterEvent = Schemas["EventRecord"];
export type ClusterView = Schemas["ClusterView"];
export type Prediction = Schemas["Prediction"];

export const JOB_KINDS = ["train", "generate", "embed", "sparse", "sweep"] as const satisfies readonly Job["spec"]["kind"][];
export type JobKind = (typeof JOB_KINDS)[number];
/** Status of a deployment at one moment: an event of kind `figures`, which has no number and is not stored. */
export interface Figures {
  name: string;
  at: string;
  replicas: Schemas["ReplicaCounts"];
  /** Status without predictions and interruptions, which change only with other events. */
  status: DeploymentStatus;
}

/** Data of an event of kind `deployment`, in addition to the state. */
export interface DeploymentNews {
  id: string;
  name: string;
  state: DeploymentState;
  from: DeploymentState | null;
  reason: string;
  replicas?: { wanted?: number; wanted_before?: number; asked?: string; asked_before?: string };
  interrupted?: { replica: number; of: number; number: number; reason: string; machines: string[]; ago_s: number };
  went_on?: { replica: number; number: number; ago_s: number; seconds: number };
  computation?: { is_compiled: boolean; gain: number | null; sentence: string };
  error?: { hint?: string };
}

export const LIVE_STATES = ["pending", "loading", "ready", "degraded"] as const satisfies readonly DeploymentState[];
export const ENDED_STATES = ["stopped", "failed"] as const satisfies readonly DeploymentState[];

export type PlanReport = Schemas["PlanReport"];
export type JobPreview = Schemas["JobPreview"];
export type SpecCheck = Schemas["SpecCheck"];
export type Upload = Schemas["UploadView"];
export type UploadKind = Upload["kind"];
export type QueuedJob = Schemas["QueuedJob"];
export type Status = Schemas["Status"];
export type Versions = Schemas["Versions"];

export const JOB_STATES = [
  "queued",
  "planning",
  "running",
  "succeeded",
  "failed",
  "cancelled",
] as const satisfies readonly JobState[];

/** Whether a machine left or was lost; it may come back. */
export function isGone({ state }: { state: ContributorState }): boolean {
  return state === "left" || state === "lost";
}
