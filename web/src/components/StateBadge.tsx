import type { ContributorState, DeploymentState, JobState } from "../api/types";
import classes from "./StateBadge.module.css";

type Tone = "quiet" | "busy" | "active" | "good" | "bad" | "ending";

type State = JobState | ContributorState | DeploymentState;

const TONES: Record<State, Tone> = {
  queued: "quiet",
  planning: "busy",
  running: "active",
  succeeded: "good",
  failed: "bad",
  cancelled: "quiet",
  joining: "busy",
  probing: "busy",
  ready: "good",
  draining: "ending",
  left: "quiet",
  lost: "bad",
  pending: "quiet",
  loading: "busy",
  degraded: "ending",
  stopped: "quiet",
};

/** A state as a word; its colour only repeats it. */
export function StateBadge({ state }: { state: State }) {
  return (
    <span className={classes.badge} data-tone={TONES[state]}>
      {state}
    </span>
  );
}
