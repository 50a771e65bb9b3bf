/** The phase of each stage in the step that the timeline plays now; the placement shows this phase, too. */
import { useSyncExternalStore } from "react";

export type Phase = "F" | "B" | "update" | "waiting";

const listeners = new Set<() => void>();
let current: ReadonlyMap<number, Phase> = new Map();

/** Set the phases by index of the stage; none when the step is no longer played. */
export function showPhases(phases: ReadonlyMap<number, Phase>): void {
  current = phases;
  listeners.forEach((listener) => listener());
}

export function usePhase(stage: number): Phase | undefined {
  return useSyncExternalStore(subscribe, () => current.get(stage));
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
