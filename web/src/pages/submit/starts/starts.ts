/** Examples to start a job from. */
import digits from "./digits.yaml?raw";
import embed from "./embed.yaml?raw";
import generate from "./generate.yaml?raw";
import language from "./language.yaml?raw";
import serve from "./serve.yaml?raw";
import sweep from "./sweep.yaml?raw";

export const STARTS = { digits, language, generate, embed, sweep, serve } as const;
export type Start = keyof typeof STARTS;

/** Whether a path is an example's placeholder. */
export function isStandIn(path: string): boolean {
  return path.startsWith("/path/on/the/server/");
}
