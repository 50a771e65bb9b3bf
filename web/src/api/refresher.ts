/**
 * Asks again for what events do not tell. At once when it is quiet; in a storm each thing at most once a second, and
 * never while the answer before is still on its way: fifty events a second must not keep every answer from arriving.
 */
import { hashKey, type QueryClient, type QueryKey } from "@tanstack/react-query";

const PAUSE_MS = 1000;

export class Refresher {
  private readonly running = new Map<string, { isStale: boolean }>();

  constructor(private readonly client: QueryClient) {}

  refresh(queryKey: QueryKey, { exact = false, pauseMs = PAUSE_MS } = {}): void {
    this.run(hashKey(queryKey) + exact, () => this.client.invalidateQueries({ queryKey, exact }), pauseMs);
  }

  /** Do something that is known by a name, likewise. */
  run(name: string, task: () => Promise<unknown>, pauseMs = PAUSE_MS): void {
    const before = this.running.get(name);
    if (before !== undefined) {
      before.isStale = true;
      return;
    }
    const turn = { isStale: false };
    this.running.set(name, turn);
    const pause = new Promise((resolve) => setTimeout(resolve, pauseMs));
    void Promise.allSettled([task(), pause]).then(() => {
      this.running.delete(name);
      if (turn.isStale) this.run(name, task, pauseMs);
    });
  }
}
