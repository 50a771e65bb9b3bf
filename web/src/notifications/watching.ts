/**
 * Choices about notifications of ended jobs, stored in this browser. Notifications are off until the user switches them
 * on.
 */
import { kept, Shared } from "../kept";

const SWITCH = "share-compute.notify";
const WATCHED = "share-compute.watched";
/** Older entries are dropped; most of their jobs have ended. */
const MOST_WATCHED = 100;

export interface Watching {
  isOn: boolean;
  /** Ids of jobs of other keys that the user watches. */
  jobs: readonly string[];
}

const shared = new Shared<Watching>([SWITCH, WATCHED], () => ({
  isOn: kept(SWITCH) === "on",
  jobs: (kept(WATCHED) ?? "").split(" ").filter(Boolean),
}));

export function watching(): Watching {
  return shared.get();
}

/** Whether the browser can show notifications: not on pages without TLS from another host. */
export function canNotify(): boolean {
  return typeof Notification !== "undefined" && isSecureContext;
}

/** Ask the browser's user for permission; return whether notifications are on now. */
export async function switchOn(): Promise<boolean> {
  const isAllowed = canNotify() && (await Notification.requestPermission()) === "granted";
  shared.keep(SWITCH, isAllowed ? "on" : "off");
  return isAllowed;
}

export function switchOff(): void {
  shared.keep(SWITCH, "off");
}

export function watch(job: string, isWatched: boolean): void {
  const others = watching().jobs.filter((one) => one !== job);
  shared.keep(WATCHED, (isWatched ? [...others, job].slice(-MOST_WATCHED) : others).join(" "));
}

export function useWatching(): Watching {
  return shared.use();
}
