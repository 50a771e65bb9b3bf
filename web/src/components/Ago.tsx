import { ago } from "../format";
import { useNow } from "../useNow";

/** How long ago a moment was; draws itself anew, so that nothing around it has to. */
export function Ago({ moment }: { moment: string }) {
  return <>{ago(moment, useNow())}</>;
}
