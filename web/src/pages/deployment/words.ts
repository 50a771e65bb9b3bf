/** Events of a deployment as sentences; like all texts of the server, in English. */
import type { DeploymentNews, ClusterEvent } from "../../api/types";
import { sentence } from "../../components/Feedback";
import { stepTime } from "../../format";
import { joined } from "../../placement/layout";
import type { Tone } from "../job/log/words";

export function toneOf({ data }: ClusterEvent): Tone {
  const { state, from, interrupted } = data as unknown as DeploymentNews;
  if (state === "failed") return "error";
  return interrupted !== undefined || (state === "degraded" && from !== state) ? "warning" : "info";
}

export function wordsFor({ data }: ClusterEvent): string {
  const { state, from, reason, replicas, interrupted, went_on } = data as unknown as DeploymentNews;
  if (interrupted !== undefined) {
    const where = interrupted.of > 1 ? ` in replica ${interrupted.replica}` : "";
    // Not capitalized: it may begin with the name of a machine.
    return interrupted.machines.length > 0
      ? `${joined(interrupted.machines)} ${interrupted.machines.length === 1 ? "was" : "were"} lost${where}; its requests wait.`
      : sentence(`${interrupted.reason}${where}`);
  }
  if (went_on !== undefined) return `Its requests go on, after ${stepTime(went_on.seconds)}.`;
  if (replicas?.asked !== undefined) return `Replicas asked for: ${replicas.asked}, before ${replicas.asked_before}.`;
  if (replicas?.wanted !== undefined) {
    return `Replicas wanted: ${replicas.wanted}, before ${replicas.wanted_before}; ${reason}.`;
  }
  return from === state ? sentence(reason) : sentence(`${state}: ${reason}`);
}
