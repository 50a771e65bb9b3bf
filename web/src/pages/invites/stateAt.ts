import type { Invite } from "../../api/types";

/** The present state of an invite, because its expiry produces no event. */
export function stateAt(invite: Invite, now: number): Invite["state"] {
  return invite.state === "open" && Date.parse(invite.expires_at) <= now ? "expired" : invite.state;
}
