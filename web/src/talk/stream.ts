/** One answer of the OpenAI API, as it comes. */
import { EventSourceParserStream } from "eventsource-parser/stream";

import { authorizedFetch } from "../api/client";
import { ofOpenAi, unreachable, type OpenAiError } from "../api/problem";
import { untilSilent } from "../api/silence";

export type Route = "/v1/chat/completions" | "/v1/completions";

export interface Piece {
  text: string;
  /** Why the model stopped, with its last piece. */
  finish: string | null;
  /** All tokens of the answer, told at the end. */
  tokens: number | null;
}

interface Chunk {
  error?: OpenAiError;
  choices?: { delta?: { content?: string | null }; text?: string; finish_reason?: string | null }[];
  usage?: { completion_tokens: number } | null;
}

/**
 * Ask, and give the pieces of the answer until it is whole.
 *
 * Throws an `ApiProblem`: with status 0 when the connection broke, else what the server says.
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
  const { text, stop } = untilSilent(response.body!, () => lost.abort());
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
  // It ended before it was whole.
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

/** What a body throws whose connection is gone: a TypeError or an AbortError, by the browser. */
function isBreak(failure: unknown): boolean {
  return failure instanceof TypeError || failure instanceof DOMException;
}
