import { useTranslation } from "react-i18next";

import type { ContributorState, DeploymentState, JobState, LinkState } from "../api/types";
import classes from "./StateBadge.module.css";

type Tone = "quiet" | "busy" | "active" | "good" | "bad" | "ending";

export type State = JobState | ContributorState | "at work" | DeploymentState | LinkState;

const TONES: Record<State, Tone> = {
  "queued": "quiet",
  "planning": "busy",
  "running": "active",
  "succeeded": "good",
  "failed": "bad",
  "cancelled": "quiet",
  "joining": "busy",
  "probing": "busy",
  "ready": "good",
  "at work": "active",
  "quarantined": "bad",
  "draining": "ending",
  "left": "quiet",
  "lost": "bad",
  "pending": "quiet",
  "loading": "busy",
  "degraded": "ending",
  "stopped": "quiet",
  "waiting": "quiet",
  "started": "good",
};

/** A state as a word; the colour only repeats it. */
export function StateBadge({ state }: { state: State }) {
  const { t } = useTranslation();
  return (
    <span className={classes.badge} data-tone={TONES[state]}>
      {t(state)}
    </span>
  );
}
