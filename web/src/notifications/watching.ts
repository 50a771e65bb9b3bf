/** Choices about notifications of ended jobs, kept in this browser. Off until the user switches them on. */
import { useSyncExternalStore } from "react";

import { keep, kept } from "../kept";

const SWITCH = "share-compute.notify";
const WATCHED = "share-compute.watched";
/** Older entries are dropped; most of their jobs have ended. */
const MOST_WATCHED = 100;

export interface Watching {
  isOn: boolean;
  /** Ids of jobs of other keys that the user watches. */
  jobs: readonly string[];
}

const listeners = new Set<() => void>();
let current: Watching | undefined;

export function watching(): Watching {
  current ??= { isOn: kept(SWITCH) === "on", jobs: (kept(WATCHED) ?? "").split(" ").filter(Boolean) };
  return current;
}

function changed(): void {
  current = undefined;
  listeners.forEach((listener) => listener());
}

/** Whether the browser can show notifications: pages without TLS from another host cannot. */
export function canNotify(): boolean {
  return typeof Notification !== "undefined" && isSecureContext;
}

/** Ask the browser's user for permission; return whether notifications are on now. */
export async function switchOn(): Promise<boolean> {
  const isAllowed = canNotify() && (await Notification.requestPermission()) === "granted";
  keep(SWITCH, isAllowed ? "on" : "off");
  changed();
  return isAllowed;
}

export function switchOff(): void {
  keep(SWITCH, "off");
  changed();
}

export function watch(job: string, isWatched: boolean): void {
  const others = watching().jobs.filter((one) => one !== job);
  keep(WATCHED, (isWatched ? [...others, job].slice(-MOST_WATCHED) : others).join(" "));
  changed();
}

function subscribe(listener: () => void): () => void {
  // Another tab has changed them.
  const onStorage = () => {
    current = undefined;
    listener();
  };
  listeners.add(listener);
  addEventListener("storage", onStorage);
  return () => {
    listeners.delete(listener);
    removeEventListener("storage", onStorage);
  };
}

export function useWatching(): Watching {
  return useSyncExternalStore(subscribe, watching);
}
