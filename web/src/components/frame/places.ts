/** Pages of the navigation, and the scopes that addresses need. */
import { may, type Scope } from "../../api/scopes";
import type { SignedInKey } from "../../api/session";

interface Place {
  to: "/" | "/jobs" | "/models" | "/playground" | "/admin";
  /** Key of `t`. */
  label: string;
  /** Prefixes of the addresses that belong to the page. */
  paths: readonly string[];
  isFor: (key: SignedInKey) => boolean;
}

const isReader = (key: SignedInKey) => may(key, "read");

export const PLACES: readonly Place[] = [
  { to: "/", label: "Machines", paths: ["/machines/"], isFor: isReader },
  { to: "/jobs", label: "Jobs", paths: ["/jobs", "/compare"], isFor: isReader },
  { to: "/models", label: "Models", paths: ["/models", "/deployments", "/playground"], isFor: isReader },
  // All others reach it from the models.
  { to: "/playground", label: "Playground", paths: ["/playground"], isFor: (key) => may(key, "chat") && !isReader(key) },
  { to: "/admin", label: "Admin", paths: ["/admin"], isFor: isReader },
];

export function isAt(path: string, paths: readonly string[]): boolean {
  return paths.some((one) => path.startsWith(one));
}

/** The scope that is required for the page at an address. */
export function scopeOf(path: string): Scope {
  if (path.startsWith("/playground")) return "chat";
  if (path.startsWith("/submit")) return "submit";
  return path.startsWith("/invites") ? "admin" : "read";
}
