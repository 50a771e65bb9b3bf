/**
 * The conversations that this browser keeps, one list for each API key. Each list is bounded: the oldest conversations
 * are dropped. All tabs share the list, so it is reread before each change. Without a signed-in key nothing is stored.
 */
import { SAVED_AS } from "./forget";
import { isRunning, type Settings, type Turn } from "./types";

export interface SavedConversation {
  id: string;
  /** Title given by the user, or the start of the first prompt. */
  title: string;
  /** Time of the last change, in milliseconds since 1970. */
  at: number;
  turns: readonly Turn[];
  settings: Settings;
}

const MOST = 50;
/** Maximum length of the stored text, in characters: browsers store about five million. */
const MOST_CHARACTERS = 4_000_000;
const LONGEST_TITLE = 60;

export class SavedConversations {
  private readonly listeners = new Set<() => void>();
  private known: { owner: string; text: string | null; list: readonly SavedConversation[] } | undefined;
  private isStale = true;
  /** Conversations that this tab has stored or opened; if one of them is missing, another tab deleted it. */
  private readonly seen = new Set<string>();
  private refused = "";

  /**
   * @param storage where the lists are kept.
   * @param owner returns the id of the API key; empty if none is signed in.
   */
  constructor(
    private readonly storage: Pick<Storage, "getItem" | "setItem">,
    private readonly owner: () => string,
  ) {}

  readonly subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  /** All conversations of the key, the last changed first. */
  readonly list = (): readonly SavedConversation[] => {
    const owner = this.owner();
    if (this.known === undefined || this.known.owner !== owner || this.isStale) {
      const text = owner === "" ? null : this.storage.getItem(SAVED_AS + owner);
      if (this.known?.owner !== owner || this.known.text !== text) this.known = { owner, text, list: read(text) };
      this.isStale = false;
    }
    return this.known.list;
  };

  /** Id of the conversation that did not fit when it was last put; empty if all fit. */
  readonly unsaved = (): string => this.refused;

  get(id: string): SavedConversation | undefined {
    const found = this.fresh().find((one) => one.id === id);
    if (found !== undefined) this.seen.add(id);
    return found;
  }

  /** Whether another tab has deleted a conversation that this tab used. */
  isDeleted(id: string): boolean {
    return this.owner() !== "" && this.seen.has(id) && this.get(id) === undefined;
  }

  /**
   * Store a conversation, and drop the oldest ones if space is short; an existing title is kept. Return whether it is
   * stored: not if it does not fit alone, or was deleted in another tab.
   */
  put(id: string, turns: readonly Turn[], settings: Settings, at: number): boolean {
    if (this.owner() === "" || this.isDeleted(id)) return false;
    const title = this.get(id)?.title ?? titleOf(turns);
    const kept = [{ id, title, at, turns, settings }, ...this.list().filter((one) => one.id !== id)].slice(0, MOST);
    while (kept.length > 0 && !this.stored(kept)) kept.pop();
    const isKept = kept.length > 0;
    if (isKept) this.seen.add(id);
    this.refused = isKept ? "" : id;
    this.changed();
    return isKept;
  }

  rename(id: string, title: string): void {
    const short = title.trim().slice(0, LONGEST_TITLE);
    if (short !== "") this.stored(this.fresh().map((one) => (one.id === id ? { ...one, title: short } : one)));
    this.changed();
  }

  remove(id: string): void {
    this.stored(this.fresh().filter((one) => one.id !== id));
    this.changed();
  }

  /** Reread the list and notify the listeners, because the list may have changed, perhaps in another tab. */
  readonly changed = (): void => {
    this.isStale = true;
    this.listeners.forEach((listener) => listener());
  };

  private fresh(): readonly SavedConversation[] {
    this.isStale = true;
    return this.list();
  }

  /** Store a list as a whole; return whether it fits. If not, the stored list stays unchanged. */
  private stored(list: readonly SavedConversation[]): boolean {
    const owner = this.owner();
    const text = JSON.stringify(list);
    if (owner === "" || text.length > MOST_CHARACTERS) return false;
    try {
      this.storage.setItem(SAVED_AS + owner, text);
      return true;
    } catch {
      return false; // the browser's storage is full
    }
  }
}

/** The start of the first prompt, in one line. */
function titleOf(turns: readonly Turn[]): string {
  const line = (turns[0]?.prompt ?? "").replace(/\s+/g, " ").trim();
  return line.length <= LONGEST_TITLE ? line : `${line.slice(0, LONGEST_TITLE - 1)}…`;
}

function read(text: string | null): readonly SavedConversation[] {
  try {
    const found: unknown = JSON.parse(text ?? "[]");
    return Array.isArray(found) ? (found as SavedConversation[]).filter((one) => typeof one.id === "string" && Array.isArray(one.turns)) : [];
  } catch {
    return [];
  }
}

/** A conversation as a JSON document: the messages of each model, and its settings. */
export function exported({ title, at, turns, settings }: SavedConversation): string {
  const models = [...new Set(turns.flatMap((turn) => turn.answers.map((answer) => answer.model)))];
  const conversations = models.map((model) => ({
    model,
    messages: [
      ...(settings.system.trim() === "" ? [] : [{ role: "system", content: settings.system }]),
      ...turns.flatMap(({ prompt, answers }) => {
        const said = answers.find((answer) => answer.model === model && !isRunning(answer));
        return said === undefined ? [] : [{ role: "user", content: prompt }, { role: "assistant", content: said.text }];
      }),
    ],
  }));
  return `${JSON.stringify({ title, changed_at: new Date(at).toISOString(), settings, conversations }, null, 2)}\n`;
}
