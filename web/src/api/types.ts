/** Short names for the schemas of the server's OpenAPI. */
import type { Readable } from "openapi-typescript-helpers";

import type { components } from "./schema";

/** As `openapi-fetch` returns them. */
type Schemas = { [Name in keyof components["schemas"]]: Readable<components["schemas"][Name]> };

export type Checkpoint = Schemas["CheckpointEntry"];
export type DeploymentState = Schemas["DeploymentState"];
export type Artifact = Schemas["ArtifactRecord"];
export type Contributor = Schemas["ContributorRecord"];
export type ContributorState = Schemas["ContributorState"];
export type Invite = Schemas["InviteView"];
export type Job = Schemas["JobRecord"];
export type JobPage = Schemas["JobPage"];
export type JobState = Schemas["JobState"];
export type Link = Schemas["Link"];
export type Measured = Schemas["Measured"];
export type Metric = Schemas["MetricRecord"];
export type Plan = Schemas["Plan"];
export type PlanTimeline = Schemas["PlanTimeline"];
export type TimelineCell = Schemas["TimelineCell"];
export type Pool = Schemas["PoolPlan"];
export type PoolEvent = Schemas["EventRecord"];
export type Prediction = Schemas["Prediction"];

export const JOB_KINDS = ["train", "generate", "embed"] as const satisfies readonly Job["spec"]["kind"][];
export type JobKind = (typeof JOB_KINDS)[number];

export const JOB_STATES = [
  "queued",
  "planning",
  "running",
  "succeeded",
  "failed",
  "cancelled",
] as const satisfies readonly JobState[];
