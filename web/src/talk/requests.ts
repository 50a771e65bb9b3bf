/** Bodies of requests to the OpenAI API. */
import type { Answer, Settings, Turn } from "./types";

/** Default number of tokens for plain text: the API's default of 16 is too short for a sentence. */
const PLAIN_TOKENS = 256;
/** Maximum fraction of the context window for the answer; the rest is for the prompt. */
const PLAIN_SHARE = 0.5;

/** A chat request with the earlier turns of this model; unanswered turns are left out. */
export function chatRequest(model: string, before: readonly Turn[], prompt: string, settings: Settings, seed: number) {
  const messages = settings.system.trim() === "" ? [] : [{ role: "system", content: settings.system }];
  for (const [question, said] of saidBefore(model, before)) {
    messages.push({ role: "user", content: question }, { role: "assistant", content: said });
  }
  messages.push({ role: "user", content: prompt });
  return { model, messages, ...options(settings, seed) };
}

/** The turns as one plain text that the model continues. */
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
