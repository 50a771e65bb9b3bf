/** Keeps all data on screen current from one event stream of the cluster. */
import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useState } from "react";

import { currentSession } from "../session";
import type { Figures, ClusterEvent } from "../types";
import { applyEvents, applyFigures } from "./applyEvents";
import { publish } from "./eventListeners";
import { listen, type LiveState } from "./live";

/** Events are rendered in batches: fifty events a second must not cause fifty renders. */
const BATCH_MS = 200;

export interface Live {
  state: LiveState;
  /** Time when the connection was last known to be up. */
  lastConnected: string | null;
}

/** Listen if the key has the scope; null if it lacks the scope. */
export function useLiveRefresh(mayListen: boolean): Live | null {
  const client = useQueryClient();
  const [live, setLive] = useState<Live>({ state: "connecting", lastConnected: null });

  useEffect(() => {
    if (!mayListen) return undefined;
    const stop = new AbortController();
    const batch = new Batch((events) => applyEvents(client, events));
    let wasLost = false;
    const onState = (state: LiveState) => {
      // The first connection misses nothing, because the stream starts at an event before all requests.
      if (state === "live" && wasLost) void client.invalidateQueries();
      wasLost = state === "lost";
      setLive((before) => ({
        state,
        lastConnected: state === "lost" && before.state === "live" ? new Date().toISOString() : before.lastConnected,
      }));
    };
    const onEvent = (kind: string, data: string) => {
      if (kind === "figures") return applyFigures(client, JSON.parse(data) as Figures);
      const event = JSON.parse(data) as ClusterEvent;
      publish(event);
      batch.add(event);
    };
    const session = currentSession();
    const start = session.state === "in" ? session.lastEvent?.toString() : undefined;
    listen("/api/v1/events?figures=true", start, { onEvent, onState }, stop.signal).catch(() => {
      // After the end of a session the sign-in page is already shown. Any other refusal would repeat.
      onState("lost");
    });
    return () => {
      stop.abort();
      batch.clear();
    };
  }, [client, mayListen]);

  return mayListen ? live : null;
}

class Batch {
  private events: ClusterEvent[] = [];
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly deliver: (events: ClusterEvent[]) => void) {}

  add(event: ClusterEvent): void {
    this.events.push(event);
    this.timer ??= setTimeout(() => {
      const events = this.events;
      this.clear();
      this.deliver(events);
    }, BATCH_MS);
  }

  clear(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.events = [];
  }
}

