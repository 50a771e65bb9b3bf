/** A conversation: the same prompts to several models, and what each of them said. */

/** What is left out is the server's to choose. */
export interface Settings {
  system: string;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  max_tokens?: number;
  seed?: number;
  /** Texts before which an answer ends. */
  stop: string[];
}

/** A place in a text where machines were lost and others went on. */
export interface Mark {
  /** Tells the losses of a deployment apart. */
  key: string;
  /** Characters before it. */
  at: number;
  /** Names; none where something else than machines was lost. */
  machines: string[];
  reason: string;
  /** Until stages were formed again; null while there are none. */
  seconds: number | null;
}

export type AnswerState =
  /** Nothing came yet. */
  | "waiting"
  | "writing"
  /** It is whole. */
  | "done"
  /** By whom it was asked. */
  | "stopped"
  /** The connection to the server broke: it may be continued. */
  | "broken"
  /** The server said no. */
  | "failed";

export interface Answer {
  model: string;
  /** Drawn where none was given: the same request with the same seed gives the same text, so it can be continued. */
  seed: number;
  /** As they were when it was asked for. */
  settings: Settings;
  state: AnswerState;
  text: string;
  marks: Mark[];
  /** Whether the model continues with plain text, since it has no chat template. */
  isPlain: boolean;
  /** Why no token comes just now, as the server says it; empty while it does not. */
  wait: string;
  /** Why the model stopped: `stop` or `length`. */
  finish: string | null;
  firstTokenS: number | null;
  /** From the first token to the last one. */
  writingS: number;
  tokens: number;
  /** Whether the server counted the tokens; else they are those pieces that came. */
  isCounted: boolean;
  problem: { message: string; hint?: string } | null;
}

export interface Turn {
  id: string;
  prompt: string;
  /** One for each model that was asked, in order. */
  answers: Answer[];
}

export function isRunning({ state }: Pick<Answer, "state">): boolean {
  return state === "waiting" || state === "writing";
}
