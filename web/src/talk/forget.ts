/** Storage entries of conversations; in a separate module, so that signing out does not load the playground. */
export const KEPT_AS = "share-compute.conversation";
/** Prefix of entries; the id of the API key follows. */
export const SAVED_AS = "share-compute.conversations.";
export const FORGET = "share-compute.forget";

/** Delete the conversation, so that the next user of this tab does not see it. */
export function forgetConversation(): void {
  remove(() => sessionStorage, KEPT_AS);
  dispatchEvent(new Event(FORGET));
}

/** Also delete the saved conversations of an API key, because its user has signed out. */
export function deleteConversations(key: string | null): void {
  if (key !== null) remove(() => localStorage, SAVED_AS + key);
  forgetConversation();
}

/** Remove an entry; do nothing if the browser refuses storage, because there is none. */
function remove(storage: () => Storage, name: string): void {
  try {
    storage().removeItem(name);
  } catch {
    // nothing is stored
  }
}
