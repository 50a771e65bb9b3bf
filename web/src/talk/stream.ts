/** Streams one answer of the OpenAI API. */
import { EventSourceParserStream } from "eventsource-parser/stream";

import { authorizedFetch } from "../api/client";
import { withReadTimeout } from "../api/events/readTimeout";
import { ofOpenAi, unreachable, type OpenAiError } from "../api/problem";

export type Route = "/v1/chat/completions" | "/v1/completions";

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

/**
 * Send a request, and yield the pieces of the answer until it is complete.
 *
 * Throws an `ApiProblem`: with status 0 if the connection broke, else with the server's message.
 */
export async function* ask(route: Route, request: object, signal: AbortSignal): AsyncGenerator<Piece> {
  const lost = new AbortController();
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const response = await authorizedFetch(
    new Request(route, {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
      body,
      cache: "no-store",
      signal: AbortSignal.any([signal, lost.signal]),
    }),
  );
  const { text, stop } = withReadTimeout(response.body!, () => lost.abort());
  try {
    for await (const event of text.pipeThrough(new EventSourceParserStream())) {
      if (event.data === "[DONE]") return;
      const piece = read(JSON.parse(event.data) as Chunk);
      if (piece !== null) yield piece;
    }
  } catch (failure) {
    if (signal.aborted || !isBreak(failure)) throw failure;
  } finally {
    stop();
  }
  // The stream ended before the answer was complete.
  throw unreachable();
}

function read(chunk: Chunk): Piece | null {
  if (chunk.error !== undefined) throw ofOpenAi(503, chunk.error);
  const choice = chunk.choices?.[0];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  const finish = choice?.finish_reason ?? null;
  const tokens = chunk.usage?.completion_tokens ?? null;
  return text === "" && finish === null && tokens === null ? null : { text, finish, tokens };
}

/** Whether an error of a response body means a lost connection: TypeError or AbortError, depending on the browser. */
function isBreak(failure: unknown): boolean {
  return failure instanceof TypeError || failure instanceof DOMException;
}
