/**
 * Refetches data that events do not contain: at once when idle, and at most once a second for each key during a burst
 * of events. It never cancels a running request, because fifty events a second would cancel every request.
 */
import { hashKey, type QueryClient, type QueryFilters, type QueryKey } from "@tanstack/react-query";

const PAUSE_MS = 1000;

export class Refresher {
  private readonly running = new Map<string, { isStale: boolean }>();

  constructor(private readonly client: QueryClient) {}

  refresh(queryKey: QueryKey, { exact = false, pauseMs = PAUSE_MS } = {}): void {
    const task = async () => {
      await this.answered({ queryKey, exact });
      await this.client.invalidateQueries({ queryKey, exact });
    };
    this.run(hashKey(queryKey) + exact, task, pauseMs);
  }

  /** Wait for running requests, because their responses may be older than the event. */
  async answered(which: QueryFilters): Promise<void> {
    const underWay = this.client.getQueryCache().findAll({ ...which, fetchStatus: "fetching" });
    await Promise.allSettled(underWay.map((query) => query.promise));
  }

  /** Run a named task at the same limited rate. */
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
