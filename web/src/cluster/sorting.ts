/** Sort orders of the table. */
import { isGone, type MachineSummary } from "../api/types";
import type { Sort } from "./search";
import type { Utilizations } from "./useUtilization";
import { busyOf } from "./words";

type Value = string | number | null;

const STATES = ["joining", "probing", "ready", "quarantined", "draining", "left", "lost"];

function valueOf(machine: MachineSummary, sort: Sort, islands: ReadonlyMap<string, number>, used: Utilizations): Value {
  switch (sort) {
    case "joined":
      return null;
    case "name":
      return machine.name;
    case "state":
      return STATES.indexOf(machine.state);
    case "work":
      return machine.held?.name ?? null;
    case "speed":
      return machine.flops_per_s > 0 ? machine.flops_per_s : null;
    case "memory":
      return machine.lent_bytes > 0 ? machine.lent_bytes : null;
    case "link":
      return machine.head_bytes_per_s;
    case "island":
      return islands.get(machine.id) ?? null;
    case "use":
      return isGone(machine) ? null : (busyOf(used[machine.id]) ?? null);
  }
}

/**
 * Sort machines. Equal ones keep the order in which they joined; those without a value come last in both directions.
 */
export function sorted(
  machines: readonly MachineSummary[],
  sort: Sort,
  descending: boolean,
  islands: ReadonlyMap<string, number>,
  used: Utilizations = {},
): readonly MachineSummary[] {
  if (sort === "joined") return descending ? machines.toReversed() : machines;
  // Created lazily, because the browser then loads its collation rules, which would slow down the first page.
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const sign = descending ? -1 : 1;
  return machines
    .map((machine) => [valueOf(machine, sort, islands, used), machine] as const)
    .sort(([one], [other]) => {
      if (one === null || other === null) return Number(one === null) - Number(other === null);
      return sign * (typeof one === "string" && typeof other === "string" ? collator.compare(one, other) : Number(one) - Number(other));
    })
    .map(([, machine]) => machine);
}
