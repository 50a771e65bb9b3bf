/** The scopes of the session's key. The server enforces them; pages only hide actions that it would refuse. */
import { useSession } from "./session";
import type { ApiKey } from "./types";

export type Scope = ApiKey["scopes"][number];

/** Scopes that an API key can be given, narrowest first. */
export const GRANTABLE = ["chat", "read", "submit", "admin"] as const satisfies readonly Scope[];

/** Same as in `share_compute.scopes`. */
const INCLUDED: Partial<Record<Scope, readonly Scope[]>> = { submit: ["chat", "read"], admin: ["chat", "read", "submit"] };

export function may(key: Pick<ApiKey, "scopes">, scope: Scope): boolean {
  return key.scopes.some((one) => one === scope || (INCLUDED[one]?.includes(scope) ?? false));
}

/** Whether the session's key has this scope. */
export function useMay(scope: Scope): boolean {
  const session = useSession();
  return session.state === "in" && may(session.key, scope);
}

/** Whether the session's key may change objects of the key `owner`. */
export function useOwns(owner: string | null | undefined): boolean {
  const session = useSession();
  if (session.state !== "in" || !may(session.key, "submit")) return false;
  return owner === session.key.id || may(session.key, "admin");
}
