import type { ContributorState, JobState } from "../api/types";
import classes from "./StateBadge.module.css";

type Tone = "quiet" | "busy" | "active" | "good" | "bad" | "ending";

const TONES: Record<JobState | ContributorState, Tone> = {
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
};

/** A state as a word; its colour only repeats it. */
export function StateBadge({ state }: { state: JobState | ContributorState }) {
  return (
    <span className={classes.badge} data-tone={TONES[state]}>
      {state}
    </span>
  );
}
