/** Where the conversation of this tab is kept, for whoever signs somebody out without loading the playground. */
export const KEPT_AS = "share-compute.conversation";
export const FORGET = "share-compute.forget";

/** The next one at this tab does not see what was said. */
export function forgetConversation(): void {
  sessionStorage.removeItem(KEPT_AS);
  dispatchEvent(new Event(FORGET));
}
