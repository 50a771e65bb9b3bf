import { useMemo, useRef } from "react";

import type { MachineGroup } from "./groups";
import { NOWHERE, settle, type Places } from "./layout";

/** Positions of islands and machines, with as few changes as possible since the last render. */
export function usePlaces(groups: readonly MachineGroup[]): { islands: Places; others: Places } {
  const last = useRef({ islands: NOWHERE, others: NOWHERE });
  return useMemo(() => {
    const named = (kind: (group: MachineGroup) => boolean) =>
      groups.filter(kind).map(({ id, machines }) => ({ id, machines: machines.map((machine) => machine.id) }));
    last.current = {
      islands: settle(last.current.islands, named((group) => group.kind === "island")),
      others: settle(last.current.others, named((group) => group.kind !== "island")),
    };
    return last.current;
  }, [groups]);
}
