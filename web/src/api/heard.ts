/** Events as they come, for what cannot wait until they are put on screen in batches. */
import type { PoolEvent } from "./types";

type Listener = (event: PoolEvent) => void;

const listeners = new Set<Listener>();

export function tell(event: PoolEvent): void {
  listeners.forEach((listener) => listener(event));
}

/** Be told of each event; returns what ends that. */
export function hear(listener: Listener): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}
