/** A conversation: the same prompts to several models, and their answers. */

/** Sampling settings; the server chooses absent ones. */
export interface Settings {
  system: string;
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  max_tokens?: number;
  seed?: number;
  /** Stop strings: the answer ends before them. */
  stop: string[];
}

/** A position in a text at which machines were lost and others took over. */
export interface Mark {
  /** Identifies a loss among the losses of a deployment. */
  key: string;
  /** Number of characters before it. */
  at: number;
  /** Names of the lost machines; empty if the cause was different. */
  machines: string[];
  reason: string;
  /** Seconds until stages were formed again; null before that. */
  seconds: number | null;
}

export type AnswerState =
  /** No token has arrived. */
  | "waiting"
  | "writing"
  /** The answer is complete. */
  | "done"
  /** The user stopped it. */
  | "stopped"
  /** The connection to the server broke, but the answer can be continued. */
  | "broken"
  /** The server refused. */
  | "failed";

export interface Answer {
  model: string;
  /**
   * Drawn at random if none was given. The same request with the same seed gives the same text, so it can be continued.
   */
  seed: number;
  /** The settings at the time of the request. */
  settings: Settings;
  state: AnswerState;
  text: string;
  marks: Mark[];
  /** Whether the model continues plain text because it has no chat template. */
  isPlain: boolean;
  /** The server's reason why no token arrives now; empty if it gives none. */
  wait: string;
  /** Whether the connection broke and the stream is being resumed. */
  isReconnecting: boolean;
  /** The finish reason: `stop` or `length`. */
  finish: string | null;
  firstTokenS: number | null;
  /** Seconds from the first token to the last token. */
  writingS: number;
  tokens: number;
  /** Whether the server counted the tokens; otherwise the number of pieces is shown. */
  isCounted: boolean;
  problem: { message: string; hint?: string } | null;
}

export interface Turn {
  id: string;
  prompt: string;
  /** One answer for each model, in order. */
  answers: Answer[];
}

export function isRunning({ state }: Pick<Answer, "state">): boolean {
  return state === "waiting" || state === "writing";
}
