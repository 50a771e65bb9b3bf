import { ago } from "../format";
import { useNow } from "../useNow";

/** The time since a moment; it re-renders itself, so that its parents need not. */
export function Ago({ moment }: { moment: string }) {
  return <>{ago(moment, useNow())}</>;
}
