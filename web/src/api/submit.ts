/** Jobs and deployments as they are written: YAML is not among the bodies that the generated client can type. */
import { authorizedFetch } from "./client";
import type { Deployment, Job, SpecCheck } from "./types";

const YAML = { "Content-Type": "application/yaml" };

/** Queue a job. */
export function submitJob(text: string, idempotencyKey: string): Promise<Job> {
  return post("/api/v1/jobs", text, { ...YAML, "Idempotency-Key": idempotencyKey });
}

/** What is asked for; the server knows the defaults of all that is left out. */
export interface WantedDeployment {
  name: string;
  model: { path: string } | { job: string; artifact?: string };
  /** A number or a range: `2`, `0..4`. */
  replicas?: string;
  max_seq?: number;
  dtype?: string;
  objective?: string;
}

/** Serve a model. */
export function deploy(wanted: WantedDeployment): Promise<Deployment> {
  const text = JSON.stringify({ kind: "serve", ...wanted });
  return post("/api/v1/deployments", text, { "Content-Type": "application/json" });
}

/** Serve a model, asked for as YAML. */
export function deployYaml(text: string): Promise<Deployment> {
  return post("/api/v1/deployments", text, YAML);
}

/** What would be wrong with it if it were submitted now. */
export function check(text: string, signal: AbortSignal): Promise<SpecCheck> {
  return post("/api/v1/jobs/check", text, YAML, signal);
}

async function post<T>(url: string, text: string, headers: HeadersInit, signal?: AbortSignal): Promise<T> {
  const response = await authorizedFetch(new Request(url, { method: "POST", headers, body: text, signal: signal ?? null }));
  return (await response.json()) as T;
}
