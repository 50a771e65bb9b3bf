import type { Invite } from "../../api/types";

/** The state of an invite now: its expiry produces no event. */
export function stateAt(invite: Invite, now: number): Invite["state"] {
  return invite.state === "open" && Date.parse(invite.expires_at) <= now ? "expired" : invite.state;
}
