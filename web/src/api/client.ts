/** The typed client of the control plane: its types come from the server's OpenAPI (`npm run types`). */
import createClient from "openapi-fetch";

import { ApiProblem, problemOf, unreachable } from "./problem";
import type { paths } from "./schema";
import { currentSession, sessionIsOver } from "./session";

/** Fetch as who is signed in: the browser sends the cookie. Anything but success is thrown as an `ApiProblem`. */
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
 * The body of an answer; `authorizedFetch` has thrown whatever was not success. Some routes answer with text (CSV, an
 * event stream) to those who ask for it, which these calls never do.
 */
export async function body<T>(answer: Promise<{ data?: T; response: Response }>): Promise<Exclude<T, string>> {
  const { data, response } = await answer;
  if (data === undefined || typeof data === "string") {
    throw new ApiProblem(response.status, { detail: "the server's answer is not what its API promises" });
  }
  return data as Exclude<T, string>;
}
