import type { Job } from "../../api/types";

export interface IdleReason {
  reason: string;
  job: Pick<Job, "id" | "name">;
}

/** The planner's reason why the running jobs do not use a machine; null if no plan names the machine. */
export function idleReason(machineId: string, running: readonly Pick<Job, "id" | "name" | "plan">[]): IdleReason | null {
  for (const { id, name, plan } of running) {
    const idle = plan?.idle?.find((one) => one.contributor_id === machineId);
    if (idle !== undefined) return { reason: idle.reason, job: { id, name } };
  }
  return null;
}
