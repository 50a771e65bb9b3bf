/**
 * The conversations that this browser keeps, one list for each API key. The list is bounded: the oldest are dropped.
 * All tabs share it, so each change reads it again.
 */
import { isRunning, type Settings, type Turn } from "./types";

export interface SavedConversation {
  id: string;
  /** Given by the user, or the start of the first prompt. */
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
const PREFIX = "share-compute.conversations.";

export class SavedConversations {
  private readonly listeners = new Set<() => void>();
  private known: { text: string | null; list: readonly SavedConversation[] } = { text: null, list: [] };

  /**
   * @param storage where the lists are kept.
   * @param owner returns the id of the API key.
   */
  constructor(
    private readonly storage: Pick<Storage, "getItem" | "setItem" | "removeItem">,
    private readonly owner: () => string,
  ) {}

  readonly subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  /** All conversations of the key, the last changed first. */
  readonly list = (): readonly SavedConversation[] => {
    const text = this.storage.getItem(this.place);
    if (text !== this.known.text) this.known = { text, list: read(text) };
    return this.known.list;
  };

  get(id: string): SavedConversation | undefined {
    return this.list().find((one) => one.id === id);
  }

  /** Store a conversation; its title stays if it has one. Return whether there was space for it. */
  put(id: string, turns: readonly Turn[], settings: Settings, at: number): boolean {
    const before = this.get(id);
    const title = before?.title ?? titleOf(turns);
    return this.write([{ id, title, at, turns, settings }, ...this.list().filter((one) => one.id !== id)]);
  }

  rename(id: string, title: string): void {
    const short = title.trim().slice(0, LONGEST_TITLE);
    if (short !== "") this.write(this.list().map((one) => (one.id === id ? { ...one, title: short } : one)));
  }

  remove(id: string): void {
    this.write(this.list().filter((one) => one.id !== id));
  }

  /** Tell the listeners that another tab changed the list. */
  readonly changed = (): void => this.listeners.forEach((listener) => listener());

  private get place(): string {
    return PREFIX + this.owner();
  }

  private write(list: readonly SavedConversation[]): boolean {
    const kept = list.slice(0, MOST);
    let isKept = false;
    while (kept.length > 0 && !isKept) {
      const text = JSON.stringify(kept);
      isKept = text.length <= MOST_CHARACTERS && this.stored(text);
      if (!isKept) kept.pop();
    }
    if (kept.length === 0) this.storage.removeItem(this.place);
    this.changed();
    return kept.length === list.length || isKept;
  }

  private stored(text: string): boolean {
    try {
      this.storage.setItem(this.place, text);
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
