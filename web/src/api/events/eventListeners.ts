/** Passes on single events as they arrive, for listeners that cannot wait for the next batch. */
import type { ClusterEvent } from "../types";

type Listener = (event: ClusterEvent) => void;

const listeners = new Set<Listener>();

export function publish(event: ClusterEvent): void {
  listeners.forEach((listener) => listener(event));
}

/** Call `listener` for each event; returns a function that unsubscribes. */
export function subscribe(listener: Listener): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}
