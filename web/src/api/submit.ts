/** Submits jobs and deployments as YAML, for which the generated client has no types. */
import { authorizedFetch } from "./client";
import type { CatalogueEntry, Deployment, Job, JobPreview, SpecCheck } from "./types";

const YAML = { "Content-Type": "application/yaml" };

/** Queue a job. */
export function submitJob(text: string, idempotencyKey: string): Promise<Job> {
  return post("/api/v1/jobs", text, { ...YAML, "Idempotency-Key": idempotencyKey });
}

/** A requested deployment; the server fills in all defaults. */
export interface WantedDeployment {
  name: string;
  model: { path: string } | { job: string; artifact?: string } | CatalogueEntry["model"];
  /** A number or a range: `2`, `0..4`. */
  replicas?: string;
  max_seq?: number;
  dtype?: string;
  compile?: string;
  objective?: string;
}

/** Serve a model. */
export function deploy(wanted: WantedDeployment): Promise<Deployment> {
  const text = JSON.stringify({ kind: "serve", ...wanted });
  return post("/api/v1/deployments", text, { "Content-Type": "application/json" });
}

/** Serve a model that is described in YAML. */
export function deployYaml(text: string): Promise<Deployment> {
  return post("/api/v1/deployments", text, YAML);
}

/** Return the problems that a job would have if it were submitted now. */
export function check(text: string, signal: AbortSignal): Promise<SpecCheck> {
  return post("/api/v1/jobs/check", text, YAML, signal);
}

/** Return the first rows of a training job's data, as training would read them. */
export function previewData(text: string): Promise<JobPreview> {
  return post("/api/v1/jobs/preview", text, YAML);
}

async function post<T>(url: string, text: string, headers: HeadersInit, signal?: AbortSignal): Promise<T> {
  const response = await authorizedFetch(new Request(url, { method: "POST", headers, body: text, signal: signal ?? null }));
  return (await response.json()) as T;
}
