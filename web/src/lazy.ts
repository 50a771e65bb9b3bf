/** Code that is loaded when it is needed. */
import { lazyRouteComponent } from "@tanstack/react-router";
import { lazy, type ComponentType } from "react";

/**
 * Milliseconds before each further request: a change of the network interrupts requests, and is over within seconds.
 * Older browsers do not request a failed module again (https://github.com/whatwg/html/pull/10327).
 */
const PAUSES_MS = [300, 1000, 3000];
const loadFailures = new WeakSet<Error>();

/** A page. If it cannot be loaded, the router reloads everything, once: the server may have a new version. */
export function lazyPage<Module extends Record<string, unknown>, Name extends keyof Module & string>(
  load: () => Promise<Module>,
  name: Name,
) {
  return lazyRouteComponent(() => withRetries(load), name);
}

/** A part of a page. */
export function lazyPart<Props>(load: () => Promise<ComponentType<Props>>) {
  return lazy(async () => ({ default: await withRetries(load) }));
}

/** Loads code; failures are repeated after pauses, and the last one is thrown. */
export async function withRetries<Loaded>(load: () => Promise<Loaded>, pauses: readonly number[] = PAUSES_MS): Promise<Loaded> {
  const [pause, ...later] = pauses;
  try {
    return await load();
  } catch (error) {
    if (pause === undefined) throw loadFailure(error);
    await new Promise((resolve) => setTimeout(resolve, pause));
    return withRetries(load, later);
  }
}

function loadFailure(error: unknown): Error {
  console.error(error);
  const failure = error instanceof Error ? error : new Error(String(error));
  loadFailures.add(failure);
  return failure;
}

/** Whether an error was thrown by `withRetries`. */
export function isLoadFailure(error: Error): boolean {
  return loadFailures.has(error);
}
