/** The conversation's storage entry; separate, so that signing out need not load the playground. */
export const KEPT_AS = "share-compute.conversation";
export const FORGET = "share-compute.forget";

/** Delete the conversation, so that the next user of this tab does not see it. */
export function forgetConversation(): void {
  sessionStorage.removeItem(KEPT_AS);
  dispatchEvent(new Event(FORGET));
}
