/** What the key that one is signed in with may do; the server decides, the pages only leave out what it would refuse. */
import { useSession } from "./session";
import type { ApiKey } from "./types";

export type Scope = ApiKey["scopes"][number];

/** Scopes that an API key can be given, from the narrowest on. */
export const GRANTABLE = ["chat", "read", "submit", "admin"] as const satisfies readonly Scope[];

/** As `share_compute.scopes` has it. */
const INCLUDED: Partial<Record<Scope, readonly Scope[]>> = { submit: ["chat", "read"], admin: ["chat", "read", "submit"] };

export function may(key: Pick<ApiKey, "scopes">, scope: Scope): boolean {
  return key.scopes.some((one) => one === scope || (INCLUDED[one]?.includes(scope) ?? false));
}

/** Whether whoever is signed in may do this. */
export function useMay(scope: Scope): boolean {
  const session = useSession();
  return session.state === "in" && may(session.key, scope);
}

/** Whether whoever is signed in may change what belongs to the key `owner`. */
export function useOwns(owner: string | null | undefined): boolean {
  const session = useSession();
  if (session.state !== "in" || !may(session.key, "submit")) return false;
  return owner === session.key.id || may(session.key, "admin");
}
