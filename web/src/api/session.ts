/** The API key of this tab: taken from the address bar or the sign-in form, kept until the tab closes. */
import { useSyncExternalStore } from "react";

import { forgetConversation } from "../talk/forget";

const NAME = "share-compute.key";
const listeners = new Set<() => void>();

/** Why the last key was put away, for the sign-in page. */
let farewell: string | undefined;

export function currentKey(): string | null {
  return sessionStorage.getItem(NAME);
}

export function signIn(key: string): void {
  farewell = undefined;
  sessionStorage.setItem(NAME, key);
  listeners.forEach((tell) => tell());
}

export function signOut(reason?: string): void {
  farewell = reason;
  sessionStorage.removeItem(NAME);
  // Who is signed out by the server finds the conversation again.
  if (reason === undefined) forgetConversation();
  listeners.forEach((tell) => tell());
}

export function signOutReason(): string | undefined {
  return farewell;
}

/** Take the key out of `#key=...`, so that it stands neither in the address bar nor in the history. */
export function adoptKeyFromAddress(): void {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return;
  history.replaceState(history.state, "", location.pathname + location.search);
  if (key.trim() !== "") signIn(key.trim());
}

export function useKey(): string | null {
  return useSyncExternalStore((tell) => {
    listeners.add(tell);
    return () => listeners.delete(tell);
  }, currentKey);
}
