import { authorizedFetch } from "./client";
import type { Deployment } from "./types";

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

export async function deploy(wanted: WantedDeployment): Promise<Deployment> {
  const response = await authorizedFetch(
    new Request("/api/v1/deployments", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ kind: "serve", ...wanted }),
    }),
  );
  return (await response.json()) as Deployment;
}
