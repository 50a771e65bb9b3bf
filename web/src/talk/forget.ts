/** Storage entries of conversations; separate, so that signing out need not load the playground. */
export const KEPT_AS = "share-compute.conversation";
/** Followed by the id of the API key. */
export const SAVED_AS = "share-compute.conversations.";
export const FORGET = "share-compute.forget";

/** Delete the conversation, so that the next user of this tab does not see it. */
export function forgetConversation(): void {
  remove(() => sessionStorage, KEPT_AS);
  dispatchEvent(new Event(FORGET));
}

/** Delete also the saved conversations of an API key: its user has signed out. */
export function deleteConversations(key: string | null): void {
  if (key !== null) remove(() => localStorage, SAVED_AS + key);
  forgetConversation();
}

/** Remove an entry; a browser that refuses storage has none. */
function remove(storage: () => Storage, name: string): void {
  try {
    storage().removeItem(name);
  } catch {
    // nothing is stored
  }
}
