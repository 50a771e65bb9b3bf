/** Small choices that the browser stores. Without storage, they last until the page is closed. */
import { useSyncExternalStore } from "react";

const unstored = new Map<string, string>();

export function kept(name: string): string | null {
  const held = unstored.get(name);
  if (held !== undefined) return held;
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // the storage is switched off
  }
}

export function keep(name: string, text: string): void {
  try {
    localStorage.setItem(name, text);
    unstored.delete(name);
  } catch {
    unstored.set(name, text); // the storage is full or switched off
  }
}

const unstoredOfTab = new Map<string, string>();

/** Like `kept`, for choices that last in this tab only, including reloads. */
export function keptInTab(name: string): string | null {
  const held = unstoredOfTab.get(name);
  if (held !== undefined) return held;
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

export function keepInTab(name: string, text: string): void {
  try {
    sessionStorage.setItem(name, text);
    unstoredOfTab.delete(name);
  } catch {
    unstoredOfTab.set(name, text);
  }
}

/** A value that is computed from stored choices. All components that use it see a change, also one in another tab. */
export class Shared<Value> {
  private readonly listeners = new Set<() => void>();
  private known: { value: Value } | undefined;

  /** @param names names of the choices. @param read returns the present value. */
  constructor(
    private readonly names: readonly string[],
    private readonly read: () => Value,
  ) {}

  readonly get = (): Value => (this.known ??= { value: this.read() }).value;

  /** Keep a choice, and tell all components. */
  keep(name: string, text: string): void {
    keep(name, text);
    this.changed();
  }

  use(): Value {
    return useSyncExternalStore(this.subscribe, this.get);
  }

  private changed(): void {
    this.known = undefined;
    this.listeners.forEach((listener) => listener());
  }

  /** Call `listener` on each change; returns a function that unsubscribes. */
  readonly subscribe = (listener: () => void): (() => void) => {
    const onStorage = ({ key }: StorageEvent) => {
      if (key !== null && !this.names.includes(key)) return;
      this.known = undefined;
      listener();
    };
    this.listeners.add(listener);
    addEventListener("storage", onStorage);
    return () => {
      this.listeners.delete(listener);
      removeEventListener("storage", onStorage);
    };
  };
}
