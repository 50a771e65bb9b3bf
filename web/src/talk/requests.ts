/** What is sent for an answer. */
import type { Answer, Settings, Turn } from "./types";

/** Tokens of an answer to plain text, where nobody said how many: the API's 16 are hardly a sentence. */
const PLAIN_TOKENS = 256;
/** A prompt has at least the rest of the window. */
const PLAIN_SHARE = 0.5;

/** What a model said before, as a conversation; turns that it did not answer are left out. */
export function chatRequest(model: string, before: readonly Turn[], prompt: string, settings: Settings, seed: number) {
  const messages = settings.system.trim() === "" ? [] : [{ role: "system", content: settings.system }];
  for (const [asked, said] of saidBefore(model, before)) {
    messages.push({ role: "user", content: asked }, { role: "assistant", content: said });
  }
  messages.push({ role: "user", content: prompt });
  return { model, messages, ...options(settings, seed) };
}

/** The same as one text that the model continues with. */
export function plainRequest(
  model: string,
  before: readonly Turn[],
  prompt: string,
  settings: Settings,
  seed: number,
  windowTokens: number | undefined,
) {
  const texts = saidBefore(model, before).flat();
  const start = settings.system.trim() === "" ? [] : [settings.system];
  const most = Math.min(PLAIN_TOKENS, Math.floor((windowTokens ?? Infinity) * PLAIN_SHARE));
  return { model, prompt: [...start, ...texts, prompt].join("\n"), max_tokens: most, ...options(settings, seed) };
}

function saidBefore(model: string, before: readonly Turn[]): [string, string][] {
  return before.flatMap(({ prompt, answers }): [string, string][] => {
    const said = answers.find((answer: Answer) => answer.model === model)?.text ?? "";
    return said === "" ? [] : [[prompt, said]];
  });
}

function options({ system: _, stop, ...given }: Settings, seed: number) {
  return { ...given, seed, ...(stop.length > 0 && { stop }) };
}
