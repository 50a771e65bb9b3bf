/** Streams one answer of the OpenAI API. */
import type { EventSourceMessage } from "eventsource-parser";
import { EventSourceParserStream } from "eventsource-parser/stream";

import { authorizedFetch } from "../api/client";
import { withReadTimeout } from "../api/events/readTimeout";
import { ApiProblem, ofOpenAi, unreachable, type OpenAiError } from "../api/problem";

export type Route = "/v1/chat/completions" | "/v1/completions";

/** Time for which a broken stream is resumed. */
const RESUME_MS = 120_000;
const FIRST_PAUSE_MS = 200;
const LONGEST_PAUSE_MS = 5000;

export interface Piece {
  text: string;
  /** The finish reason, with the last piece. */
  finish: string | null;
  /** Total number of tokens of the answer, sent at the end. */
  tokens: number | null;
}

interface Chunk {
  error?: OpenAiError;
  choices?: { delta?: { content?: string | null }; text?: string; finish_reason?: string | null }[];
  usage?: { completion_tokens: number } | null;
}

interface Stream {
  /** The server's id of the stream; null if it cannot be resumed. */
  id: string | null;
  lastEventId: string;
}

/**
 * Send a request, and yield the pieces of the answer until it is complete. If the connection breaks or the server
 * restarts, the stream is resumed after its last event. An aborted request is cancelled on the server.
 *
 * Throws an `ApiProblem`: with status 0 if the connection broke for too long, else with the server's message.
 *
 * @param setReconnecting called when the connection broke, and when events arrive again.
 */
export async function* ask(
  route: Route,
  request: object,
  signal: AbortSignal,
  setReconnecting: (isReconnecting: boolean) => void,
): AsyncGenerator<Piece> {
  const stream: Stream = { id: null, lastEventId: "" };
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const headers = { "Content-Type": "application/json", "X-Resumable": "true" };
  let events = open(stream, route, { method: "POST", headers, body }, signal);
  let brokenSince: number | null = null;
  let failures = 0;
  try {
    for (;;) {
      let event: EventSourceMessage;
      try {
        event = await next(events);
      } catch (failure) {
        if (signal.aborted || stream.id === null || !(failure instanceof ApiProblem && failure.mayPass)) throw failure;
        brokenSince ??= performance.now();
        if (performance.now() - brokenSince > RESUME_MS) throw failure;
        setReconnecting(true);
        await pause(Math.min(FIRST_PAUSE_MS * 2 ** failures, LONGEST_PAUSE_MS), signal);
        failures += 1;
        const last = stream.lastEventId;
        events = open(stream, pathOf(stream.id), { headers: last === "" ? {} : { "Last-Event-ID": last } }, signal);
        continue;
      }
      if (brokenSince !== null) setReconnecting(false);
      [brokenSince, failures] = [null, 0];
      stream.lastEventId = event.id ?? "";
      if (event.data === "[DONE]") {
        stream.id = null;
        return;
      }
      const piece = read(JSON.parse(event.data) as Chunk);
      if (piece !== null) yield piece;
    }
  } finally {
    if (signal.aborted && stream.id !== null) cancel(stream.id);
    await events.return(undefined);
  }
}

/** Open one connection, and yield its events; throw an `ApiProblem` when the connection breaks or ends. */
async function* open(
  stream: Stream,
  path: string,
  options: RequestInit,
  signal: AbortSignal,
): AsyncGenerator<EventSourceMessage, undefined> {
  const lost = new AbortController();
  const headers = { ...options.headers, Accept: "text/event-stream" };
  const either = AbortSignal.any([signal, lost.signal]);
  const response = await authorizedFetch(new Request(path, { ...options, headers, cache: "no-store", signal: either }));
  stream.id = response.headers.get("X-Stream-Id");
  const { text, stop } = withReadTimeout(response.body!, () => lost.abort());
  try {
    for await (const event of text.pipeThrough(new EventSourceParserStream())) yield event;
  } catch (failure) {
    if (signal.aborted || !isBreak(failure)) throw failure;
  } finally {
    stop();
  }
  throw unreachable();
}

async function next(events: AsyncGenerator<EventSourceMessage, undefined>): Promise<EventSourceMessage> {
  const { done, value } = await events.next();
  if (done) throw unreachable();
  return value;
}

/** Wait; throw when the signal aborts. */
async function pause(ms: number, signal: AbortSignal): Promise<void> {
  await new Promise<void>((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
  signal.throwIfAborted();
}

function pathOf(id: string): string {
  return `/v1/streams/${encodeURIComponent(id)}`;
}

/** Cancel a stream, even while the page closes. A stream that is not cancelled expires without readers. */
function cancel(id: string): void {
  authorizedFetch(new Request(pathOf(id), { method: "DELETE", keepalive: true })).catch(() => undefined);
}

function read(chunk: Chunk): Piece | null {
  if (chunk.error !== undefined) throw ofOpenAi(503, chunk.error);
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  const finish = choice?.finish_reason ?? null;
  const tokens = chunk.usage?.completion_tokens ?? null;
  return text === "" && finish === null && tokens === null ? null : { text, finish, tokens };
}

/** Whether an error while reading a body means a lost connection: TypeError or AbortError, depending on the browser. */
function isBreak(failure: unknown): boolean {
  return failure instanceof TypeError || failure instanceof DOMException;
}
