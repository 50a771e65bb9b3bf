/** Events as they come, for what cannot wait until they are put on screen in batches. */
import type { ClusterEvent } from "./types";

type Listener = (event: ClusterEvent) => void;

const listeners = new Set<Listener>();

export function tell(event: ClusterEvent): void {
  listeners.forEach((listener) => listener(event));
}

/** Be told of each event; returns what ends that. */
export function hear(listener: Listener): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}
