/** What a job can be started from. */
import digits from "./digits.yaml?raw";
import embed from "./embed.yaml?raw";
import generate from "./generate.yaml?raw";
import language from "./language.yaml?raw";
import serve from "./serve.yaml?raw";

export const STARTS = { digits, language, generate, embed, serve } as const;
export type Start = keyof typeof STARTS;

/** Paths that an example only stands in for. */
export function isStandIn(path: string): boolean {
  return path.startsWith("/path/on/the/server/");
}
