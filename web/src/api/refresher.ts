/**
 * Asks again for what events do not tell. At once when it is quiet; in a storm each thing at most once a second, and
 * never while the answer before is still on its way: fifty events a second must not keep every answer from arriving.
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

  /** Wait for answers that are on their way already: they may be older than what just happened. */
  async answered(which: QueryFilters): Promise<void> {
    const underWay = this.client.getQueryCache().findAll({ ...which, fetchStatus: "fetching" });
    await Promise.allSettled(underWay.map((query) => query.promise));
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
