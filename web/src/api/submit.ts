import { authorizedFetch } from "./client";
import type { Job } from "./types";

/** Send a job as it was written: YAML is not among the bodies that the generated client can type. */
export async function submitYaml(text: string, idempotencyKey: string): Promise<Job> {
  const response = await authorizedFetch(
    new Request("/api/v1/jobs", {
      method: "POST",
      headers: { "Content-Type": "application/yaml", "Idempotency-Key": idempotencyKey },
      body: text,
    }),
  );
  return (await response.json()) as Job;
}
