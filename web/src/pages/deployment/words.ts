/** Events of a deployment as sentences. */
import type { TFunction } from "i18next";

import type { DeploymentNews, ClusterEvent } from "../../api/types";
import { clause, sentence } from "../../components/Feedback";
import { stepTime } from "../../format";
import { translated } from "../../i18n/texts";
import { joined } from "../../placement/layout";
import type { Tone } from "../job/log/words";

export function toneOf({ data }: ClusterEvent): Tone {
  const { state, from, interrupted } = data as unknown as DeploymentNews;
  if (state === "failed") return "error";
  return interrupted !== undefined || (state === "degraded" && from !== state) ? "warning" : "info";
}

export function wordsFor({ data }: ClusterEvent, t: TFunction): string {
  const { state, from, reason, replicas, interrupted, went_on, computation } = data as unknown as DeploymentNews;
  if (interrupted !== undefined) {
    const where = interrupted.of > 1 ? t(" in replica {{number}}", { number: interrupted.replica }) : "";
    if (interrupted.machines.length === 0) return sentence(`${translated(interrupted.reason)}${where}`);
    const words = { names: joined(interrupted.machines), where };
    return interrupted.machines.length === 1
      ? t("{{names}} was lost{{where}}; its requests wait.", words)
      : t("{{names}} were lost{{where}}; its requests wait.", words);
  }
  if (went_on !== undefined) return t("Its requests go on, after {{time}}.", { time: stepTime(went_on.seconds) });
  if (computation !== undefined) return sentence(computation.sentence);
  if (replicas?.asked !== undefined) {
    return t("Replicas asked for: {{now}}, before {{before}}.", { now: replicas.asked, before: replicas.asked_before });
  }
  if (replicas?.wanted !== undefined) {
    const words = { now: replicas.wanted, before: replicas.wanted_before, why: clause(reason) };
    return t("Replicas wanted: {{now}}, before {{before}}; {{why}}", words);
  }
  if (from === state) return sentence(reason);
  return sentence(t("{{state}}: {{reason}}", { state: t(state), reason: translated(reason) }));
}
