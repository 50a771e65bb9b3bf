/** The typed client of the control plane: its types come from the server's OpenAPI (`npm run types`). */
import createClient from "openapi-fetch";

import { ApiProblem, problemOf, unreachable } from "./problem";
import type { paths } from "./schema";
import { currentKey, signOut } from "./session";

/** The headers by which the server knows who asks. */
export function authorization(): Record<string, string> {
  const key = currentKey();
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

/** Fetch with the key of this tab; anything but success is thrown as an `ApiProblem`. */
export async function authorizedFetch(request: Request): Promise<Response> {
  const key = currentKey();
  for (const [name, value] of Object.entries(authorization())) request.headers.set(name, value);
  let response: Response;
  try {
    response = await fetch(request);
  } catch (failure) {
    if (request.signal.aborted) throw failure;
    throw unreachable();
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (response.status === 401 && key !== null && key === currentKey()) signOut("The server no longer accepts this key.");
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

/** Whether the server knows a key; an error other than "no" is thrown. */
export async function isKeyGood(key: string): Promise<boolean> {
  const response = await fetch("/api/v1/status", { headers: { Authorization: `Bearer ${key}` } }).catch(() => null);
  if (response === null) throw unreachable();
  if (response.status === 401 || response.status === 403) return false;
  if (!response.ok) throw await problemOf(response);
  return true;
}
