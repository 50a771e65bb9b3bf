/**
 * Server-sent events over fetch. EventSource cannot start at a given event, and reports neither the end of a session
 * nor a complete stream. A lost or unresponsive connection is opened again after the last received event
 * (`Last-Event-ID`). The wait doubles each time, up to `SLOWEST_MS`. The server then sends exactly the events after
 * that one.
 */
import { EventSourceParserStream } from "eventsource-parser/stream";

import { authorizedFetch } from "../client";
import { ApiProblem } from "../problem";
import { withReadTimeout } from "./readTimeout";

const FIRST_MS = 500;
const SLOWEST_MS = 15_000;

export type LiveState = "connecting" | "live" | "lost";

export interface Listener {
  onEvent: (kind: string, data: string, id: string) => void;
  onState: (state: LiveState) => void;
}

/**
 * Listen until `signal` aborts, or until the server refuses permanently (the session has ended, the job was deleted).
 */
export async function listen(
  url: string,
  startId: string | undefined,
  listener: Listener,
  signal: AbortSignal,
): Promise<void> {
  let lastId = startId;
  let wait = FIRST_MS;
  while (!signal.aborted) {
    try {
      const headers: Record<string, string> = { Accept: "text/event-stream" };
      if (lastId !== undefined) headers["Last-Event-ID"] = lastId;
      const lost = new AbortController();
      const either = AbortSignal.any([signal, lost.signal]);
      const response = await authorizedFetch(new Request(url, { headers, signal: either, cache: "no-store" }));
      // No content means that the stream is complete, and the standard forbids reconnecting.
      if (response.status === 204 || response.body === null) return;
      listener.onState("live");
      const { text, stop } = withReadTimeout(response.body, () => lost.abort());
      try {
        for await (const event of text.pipeThrough(new EventSourceParserStream())) {
          wait = FIRST_MS;
          if (event.id !== undefined) lastId = event.id;
          listener.onEvent(event.event ?? "message", event.data, lastId ?? "");
        }
      } finally {
        stop();
      }
    } catch (failure) {
      if (signal.aborted) return;
      if (failure instanceof ApiProblem && !failure.mayPass) throw failure;
    }
    if (signal.aborted) return;
    listener.onState("lost");
    await pause(wait, signal);
    wait = Math.min(wait * 2, SLOWEST_MS);
  }
}

function pause(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
