/**
 * The session of the browser. It is a cookie that no script can read. The sign-in form exchanges an API key for it, and
 * a link exchanges a one-time code. Neither key nor code is stored. This module knows only the key's name.
 */
import { useSyncExternalStore } from "react";

import { keepInTab, keptInTab } from "../kept";
import { deleteConversations, forgetConversation } from "../talk/forget";
import { problemOf, unreachable, type ApiProblem } from "./problem";
import type { components } from "./schema";

export type Session =
  | { state: "asking" }
  /** `lastEvent`: the newest event at the time of the check. */
  | { state: "in"; key: SignedInKey; lastEvent: number | null }
  /** `why`: the key was refused or the session has ended; absent on a first visit and after signing out. */
  | { state: "out"; why?: "refused" | "over" }
  | { state: "failed"; error: Error; retry: () => void };

type SessionView = components["schemas"]["SessionView"];
export type SignedInKey = NonNullable<SessionView["key"]>;

const ADDRESS = "/api/v1/session";
const SIGNED_OUT = "signed out";
/** Storage entry for the key to which this tab's conversation belongs. */
const LAST_KEY = "share-compute.key";
const RENEWED_MS = 6 * 3600 * 1000;
const listeners = new Set<(session: Session) => void>();
/** All tabs share the cookie, so each tab notifies the others. */
const tabs = typeof BroadcastChannel === "undefined" ? undefined : new BroadcastChannel("share-compute.session");

let current: Session = { state: "asking" };

export function currentSession(): Session {
  return current;
}

/** Call `listener` on each change; returns a function that unsubscribes. */
export function onSession(listener: (session: Session) => void): () => void {
  listeners.add(listener);
  return () => void listeners.delete(listener);
}

export function useSession(): Session {
  return useSyncExternalStore(onSession, currentSession);
}

function become(next: Session): void {
  current = next;
  listeners.forEach((listener) => listener(next));
}

/** Sign in with the code in `#code=...` or the key in `#key=...` if there is one, else with the cookie. */
export async function startSession(): Promise<void> {
  addEventListener("hashchange", () => void adoptSecretFromAddress());
  if (tabs !== undefined) {
    tabs.onmessage = ({ data }) => {
      if (data === SIGNED_OUT) deleteConversations(keptInTab(LAST_KEY));
      void lookAgain();
    };
  }
  // A request renews the session, so that the page can stay open.
  setInterval(() => current.state === "in" && void lookAgain(), RENEWED_MS);
  if (!(await adoptSecretFromAddress())) await lookAgain();
}

/** Sign in with the secret in the address, and remove it from the address and the history. */
async function adoptSecretFromAddress(): Promise<boolean> {
  const given = new URLSearchParams(location.hash.slice(1));
  const [code, key] = [given.get("code")?.trim(), given.get("key")?.trim()];
  if (code === undefined && key === undefined) return false;
  history.replaceState(history.state, "", location.pathname + location.search);
  const secret = code ? { code } : key ? { key } : undefined;
  if (secret === undefined) return false;
  try {
    await exchange(secret);
  } catch (failure) {
    const { status } = failure as ApiProblem;
    if (status !== 401) fail(failure, () => void exchange(secret).catch(() => undefined));
    else {
      // A code works only once. If its link is opened again, the browser may already be signed in.
      await lookAgain();
      if (current.state === "out") become({ state: "out", why: "refused" });
    }
  }
  return true;
}

/** Exchange a key for a session; an unknown key is a problem with status 401. */
export async function signIn(key: string): Promise<void> {
  await exchange({ key });
}

async function exchange(secret: { key: string } | { code: string }): Promise<void> {
  const body = JSON.stringify(secret);
  const response = await ask({ method: "POST", body, headers: { "Content-Type": "application/json" } });
  settle((await response.json()) as SessionView);
  tabs?.postMessage("changed");
}

export async function signOut(): Promise<void> {
  try {
    await ask({ method: "DELETE" });
  } catch (failure) {
    // The cookie still exists, so the page must not claim that the user is signed out.
    fail(failure, () => void signOut());
    return;
  }
  // Conversations are deleted only here. After a session has expired, the same user finds them again.
  deleteConversations(keptInTab(LAST_KEY));
  become({ state: "out" });
  tabs?.postMessage(SIGNED_OUT);
}

/** Handle the server's refusal of this session. */
export function sessionIsOver(refused: Session): void {
  if (refused.state === "in" && refused === current) become({ state: "out", why: "over" });
}

async function lookAgain(): Promise<void> {
  try {
    settle((await (await ask({ cache: "no-store" })).json()) as SessionView);
  } catch (failure) {
    if (current.state !== "in") fail(failure, () => void lookAgain());
  }
}

function settle({ key, last_event }: SessionView): void {
  if (key === null) {
    if (current.state !== "out") become({ state: "out" });
  } else if (current.state !== "in" || current.key.id !== key.id) {
    const last = keptInTab(LAST_KEY);
    if (last !== null && last !== key.id) forgetConversation();
    keepInTab(LAST_KEY, key.id);
    become({ state: "in", key, lastEvent: last_event });
  }
}

function fail(failure: unknown, retry: () => void): void {
  const again = () => {
    become({ state: "asking" });
    retry();
  };
  become({ state: "failed", error: failure as Error, retry: again });
}

async function ask(request: RequestInit): Promise<Response> {
  const response = await fetch(ADDRESS, request).catch(() => {
    throw unreachable();
  });
  if (!response.ok) throw await problemOf(response);
  return response;
}
