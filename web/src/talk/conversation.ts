/**
 * The conversation of this tab. It is independent of the pages: answers continue while another page is open. After a
 * reload it is restored, and interrupted answers can be continued.
 */
import { subscribe } from "../api/events/eventListeners";
import { currentSession } from "../api/session";
import { ApiProblem } from "../api/problem";
import { readServedModels } from "../api/queries";
import type { DeploymentNews, ClusterEvent, Model } from "../api/types";
import { kept } from "../kept";
import { caughtUp, commonLength } from "./catchUp";
import { FORGET, KEPT_AS, SAVED_AS } from "./forget";
import { arrived, markOf, pinned, settled, type Arrivals } from "./marks";
import { chatRequest, plainRequest } from "./requests";
import { SavedConversations } from "./saved";
import { ask, type Piece, type Route } from "./stream";
import { isRunning, type Answer, type Settings, type Turn } from "./types";

/** Maximum time between an answer's last token and the report of its recovery. */
const NEWS_MS = 5000;
const SAVE_MS = 500;
/** Number of possible seeds; JavaScript numbers, and thus JSON, represent each seed exactly. */
const SEEDS = 2 ** 31;

export interface Talk {
  /** Identifies it among the saved conversations. */
  id: string;
  turns: readonly Turn[];
  settings: Settings;
}

function empty(settings: Settings = { system: "", stop: [] }): Talk {
  return { id: newId(), turns: [], settings };
}

/** Conversations of the signed-in key that this browser keeps. */
export const saved = new SavedConversations(
  { getItem: kept, setItem: (name, text) => localStorage.setItem(name, text) },
  () => {
    const session = currentSession();
    return session.state === "in" ? session.key.id : "";
  },
);
addEventListener("storage", ({ key }) => (key === null || key.startsWith(SAVED_AS)) && saved.changed());

/** A running answer. */
interface Work {
  stop: AbortController;
  arrivals: Arrivals;
  began: number;
  first: number | null;
  last: number;
  pieces: number;
}

class Conversation {
  private talk = load();
  /** The version that was saved last; the conversation before a reload was saved when the page was closed. */
  private kept: Talk | undefined = this.talk;
  private readonly listeners = new Set<() => void>();
  private readonly works = new Map<string, Work>();
  private saving: ReturnType<typeof setTimeout> | undefined;
  private drawing = false;
  private unsubscribe: (() => void) | undefined;

  readonly subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  };

  readonly snapshot = (): Talk => this.talk;

  set(settings: Settings): void {
    this.change({ ...this.talk, settings });
  }

  /** Send a prompt to models; an edited prompt replaces the last turn. */
  send(prompt: string, models: readonly string[], served: Served, isEdit = false): void {
    if (isEdit) this.dropLast();
    const turn = { id: newId(), prompt, answers: models.map((model) => this.begun(model)) };
    // If another tab deleted the conversation, it becomes a new one when the user continues it.
    const id = saved.isDeleted(this.talk.id) ? newId() : this.talk.id;
    this.change({ ...this.talk, id, turns: [...this.talk.turns, turn] });
    for (const { model } of turn.answers) void this.run(turn.id, model, served);
  }

  /** Resend the last prompt to one model; the answer differs unless a seed was given. */
  regenerate(turnId: string, model: string, served: Served): void {
    this.stopOne(turnId, model);
    this.update(turnId, model, () => this.begun(model));
    void this.run(turnId, model, served);
  }

  /** Continue an interrupted answer: the same request with the same seed gives the same text. */
  goOn(turnId: string, model: string, served: Served): void {
    this.update(turnId, model, (answer) => ({ ...answer, state: "writing", problem: null, wait: "" }));
    void this.run(turnId, model, served);
  }

  stop(): void {
    for (const work of this.works.values()) work.stop.abort();
  }

  /** Start another conversation with the same settings; the present one stays saved. */
  begin(): void {
    this.keep();
    this.stop();
    this.change(empty(this.talk.settings));
  }

  /** Show a saved conversation, and stop the answers of the present one. */
  open(id: string): void {
    const found = saved.get(id);
    if (found === undefined || id === this.talk.id) return;
    this.keep();
    this.stop();
    this.kept = { id, turns: found.turns, settings: found.settings };
    this.change(this.kept);
  }

  /** Delete a saved conversation. */
  remove(id: string): void {
    if (id === this.talk.id) {
      this.stop();
      this.change(empty(this.talk.settings));
    }
    saved.remove(id);
  }

  /** Remove the conversation and the settings from this tab; saved conversations stay. */
  forget(): void {
    this.stop();
    this.change(empty());
    clearTimeout(this.saving);
    this.saving = undefined;
    sessionStorage.removeItem(KEPT_AS);
  }

  private dropLast(): void {
    const last = this.talk.turns.at(-1);
    for (const answer of last?.answers ?? []) this.stopOne(last!.id, answer.model);
    this.change({ ...this.talk, turns: this.talk.turns.slice(0, -1) });
  }

  private stopOne(turnId: string, model: string): void {
    this.works.get(`${turnId} ${model}`)?.stop.abort();
  }

  private begun(model: string): Answer {
    const seed = this.talk.settings.seed ?? Math.floor(Math.random() * SEEDS);
    return {
      model,
      seed,
      settings: this.talk.settings,
      state: "waiting",
      text: "",
      marks: [],
      isPlain: false,
      wait: "",
      isReconnecting: false,
      finish: null,
      firstTokenS: null,
      writingS: 0,
      tokens: 0,
      isCounted: false,
      problem: null,
    };
  }

  private async run(turnId: string, model: string, served: Served): Promise<void> {
    const key = `${turnId} ${model}`;
    const index = this.talk.turns.findIndex((one) => one.id === turnId);
    const { prompt, answers } = this.talk.turns[index]!;
    const before = this.talk.turns.slice(0, index);
    const { seed, settings, text: known } = answers.find((one) => one.model === model)!;
    const now = performance.now();
    const work: Work = { stop: new AbortController(), arrivals: { points: [] }, began: now, first: null, last: now, pieces: 0 };
    this.works.set(key, work);
    this.unsubscribe ??= subscribe((event) => this.receive(event));
    // A replaced request must no longer change anything.
    const apply = (change: (answer: Answer) => Answer) => {
      if (this.works.get(key) === work) this.update(turnId, model, change);
    };
    const read = async (route: Route, request: object) => {
      let fresh = "";
      const setReconnecting = (isReconnecting: boolean) => apply((answer) => ({ ...answer, isReconnecting }));
      for await (const piece of ask(route, request, work.stop.signal, setReconnecting)) {
        fresh += piece.text;
        const shown = caughtUp(known, fresh);
        const agreed = commonLength(known, fresh);
        apply((answer) => written(answer, piece, shown, agreed, work));
      }
    };
    try {
      const facts = served.get(model) ?? (await readServedModels(work.stop.signal)).find((one) => one.id === model);
      if (facts?.has_chat_template === false) {
        apply((answer) => ({ ...answer, isPlain: true }));
        await read("/v1/completions", plainRequest(model, before, prompt, settings, seed, facts.max_model_len));
      } else {
        await read("/v1/chat/completions", chatRequest(model, before, prompt, settings, seed));
      }
      apply((answer) => ({ ...answer, state: "done", wait: "", marks: pinned(answer) }));
    } catch (failure) {
      const end = ending(failure, work.stop.signal);
      apply((answer) => ({ ...answer, wait: "", isReconnecting: false, marks: pinned(answer), ...end }));
    } finally {
      setTimeout(() => this.unlearn(key, work), NEWS_MS);
    }
  }

  private unlearn(key: string, work: Work): void {
    if (this.works.get(key) === work) this.works.delete(key);
    if (this.works.size === 0) {
      this.unsubscribe?.();
      this.unsubscribe = undefined;
    }
  }

  /** Mark an event of a deployment in its running answers, at the position where it happened. */
  private receive(event: ClusterEvent): void {
    if (event.kind !== "deployment") return;
    const news = event.data as unknown as DeploymentNews;
    const now = performance.now();
    for (const [key, work] of this.works) {
      const [turnId, ...rest] = key.split(" ");
      const model = rest.join(" ");
      if (model === news.name) this.update(turnId!, model, (answer) => withNews(answer, news, work, now));
    }
  }

  private update(turnId: string, model: string, change: (answer: Answer) => Answer): void {
    const turns = this.talk.turns.map((turn) =>
      turn.id !== turnId
        ? turn
        : { ...turn, answers: turn.answers.map((answer) => (answer.model === model ? change(answer) : answer)) },
    );
    this.talk = { ...this.talk, turns };
    this.drawSoon();
    this.saveSoon();
  }

  /** Apply a user's change and render it at once, because a field must show a key before the next one. */
  private change(talk: Talk): void {
    this.talk = talk;
    this.listeners.forEach((listener) => listener());
    this.saveSoon();
  }

  /** Render once per frame, however many pieces arrive. */
  private drawSoon(): void {
    if (this.drawing) return;
    this.drawing = true;
    const draw = () => {
      this.drawing = false;
      this.listeners.forEach((listener) => listener());
    };
    // There are no frames while the page is in the background.
    if (document.hidden) setTimeout(draw);
    else requestAnimationFrame(draw);
  }

  private saveSoon(): void {
    this.saving ??= setTimeout(() => this.save(), SAVE_MS);
  }

  /** Store the conversation, and cancel its running answers: they can be continued after a reload. */
  readonly leave = (): void => {
    this.keep();
    this.save();
    this.stop();
  };

  /** Save the conversation if it has changed; saved conversations contain no running answers. */
  private keep(): void {
    const { id, turns, settings } = this.talk;
    const isKept = this.kept?.id === id && this.kept.turns === turns && this.kept.settings === settings;
    if (turns.length === 0 || isKept) return;
    if (saved.put(id, turns.map(brokenOff), settings, Date.now())) this.kept = this.talk;
  }

  readonly save = (): void => {
    clearTimeout(this.saving);
    this.saving = undefined;
    // Writing the long list of saved conversations is slow, so it is not written while a text grows.
    if (!this.talk.turns.some((turn) => turn.answers.some(isRunning))) this.keep();
    try {
      sessionStorage.setItem(KEPT_AS, JSON.stringify(this.talk));
    } catch {
      // The storage is full: the conversation is lost when the page is closed.
      sessionStorage.removeItem(KEPT_AS);
    }
  };
}

/** Models that clients can call now, by their names. */
export type Served = ReadonlyMap<string, Model>;

function written(answer: Answer, piece: Piece, text: string, agreed: number, work: Work): Answer {
  const now = performance.now();
  if (piece.text !== "") {
    work.first ??= now;
    work.last = now;
    work.pieces += 1;
    work.arrivals = arrived(work.arrivals, now, text.length);
  }
  const isRewritten = !text.startsWith(answer.text) && text.length !== answer.text.length;
  return {
    ...answer,
    state: "writing",
    text,
    // Remove marks behind the position where the new text differs.
    marks: isRewritten ? answer.marks.filter((mark) => mark.at <= agreed) : answer.marks,
    wait: piece.text === "" ? answer.wait : "",
    finish: piece.finish ?? answer.finish,
    firstTokenS: work.first === null ? null : (work.first - work.began) / 1000,
    writingS: work.first === null ? 0 : (work.last - work.first) / 1000,
    tokens: piece.tokens ?? work.pieces,
    isCounted: piece.tokens !== null,
  };
}

function withNews(answer: Answer, news: DeploymentNews, work: Work, now: number): Answer {
  if (news.went_on !== undefined) {
    const until = isRunning(answer) ? now : work.last;
    return { ...answer, marks: settled(answer.marks, news.went_on, answer.text, work.arrivals, now, until), wait: "" };
  }
  if (!isRunning(answer)) return answer;
  if (news.interrupted !== undefined) {
    const mark = markOf(news.interrupted, work.arrivals, now);
    return mark === null ? answer : { ...answer, marks: [...answer.marks, mark], wait: news.interrupted.reason };
  }
  if (news.state === news.from) return answer;
  return { ...answer, wait: news.state === "ready" ? "" : news.reason };
}

function ending(failure: unknown, signal: AbortSignal): Pick<Answer, "state" | "problem"> {
  if (signal.aborted) return { state: "stopped", problem: null };
  const problem =
    failure instanceof ApiProblem
      ? { message: failure.message, ...(failure.hint !== undefined && { hint: failure.hint }) }
      : { message: String(failure) };
  return { state: failure instanceof ApiProblem && failure.status === 0 ? "broken" : "failed", problem };
}

function load(): Talk {
  try {
    const talk = JSON.parse(sessionStorage.getItem(KEPT_AS) ?? "null") as Talk | null;
    return talk === null ? empty() : { ...talk, turns: talk.turns.map(brokenOff) };
  } catch {
    return empty();
  }
}

/** A turn whose answers were interrupted when the page was closed. */
function brokenOff(turn: Turn): Turn {
  const answers = turn.answers.map((answer): Answer =>
    isRunning(answer) ? { ...answer, state: "broken", wait: "", isReconnecting: false, marks: pinned(answer), problem: { message: "the page was left while it was written" } } : answer,
  );
  return { ...turn, answers };
}

function newId(): string {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

export const conversation = new Conversation();
addEventListener("pagehide", conversation.leave);
addEventListener(FORGET, () => {
  conversation.forget();
  saved.changed();
});
