/** The typed client of the control plane: its types come from the server's OpenAPI (`npm run types`). */
import createClient from "openapi-fetch";

import { ApiProblem, problemOf, unreachable } from "./problem";
import type { paths } from "./schema";
import { currentSession, sessionIsOver } from "./session";

/** Fetch with the session's cookie, which the browser sends. Any unsuccessful response is thrown as an `ApiProblem`. */
export async function authorizedFetch(request: Request): Promise<Response> {
  const session = currentSession();
  let response: Response;
  try {
    response = await fetch(request);
  } catch (failure) {
    if (request.signal.aborted) throw failure;
    throw unreachable();
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (response.status === 401) sessionIsOver(session);
  throw problem;
}

export const api = createClient<paths>({ baseUrl: globalThis.location?.origin ?? "", fetch: authorizedFetch });

/**
 * Return the body of a response; `authorizedFetch` has already thrown an error for an unsuccessful response. Some
 * routes can also answer with text (CSV, an event stream); the calls here never request that.
 */
export async function body<T>(answer: Promise<{ data?: T; response: Response }>): Promise<Exclude<T, string>> {
  const { data, response } = await answer;
  if (data === undefined || typeof data === "string") {
    throw new ApiProblem(response.status, { detail: "the server's answer is not what its API promises" });
  }
  return data as Exclude<T, string>;
}
