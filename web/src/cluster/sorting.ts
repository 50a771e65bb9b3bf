/** Orders of the table. */
import type { Glance } from "../api/types";
import type { Sort } from "./search";

type Value = string | number | null;

const STATES = ["joining", "probing", "ready", "quarantined", "draining", "left", "lost"];

function valueOf(machine: Glance, sort: Sort, islands: ReadonlyMap<string, number>): Value {
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
  }
}

/** Machines in an order; equal ones stay as they joined, and those without a value come last in both directions. */
export function sorted(
  machines: readonly Glance[],
  sort: Sort,
  descending: boolean,
  islands: ReadonlyMap<string, number>,
): readonly Glance[] {
  if (sort === "joined") return descending ? machines.toReversed() : machines;
  // Made here: the browser reads its rules of languages when the first one is made, which a first load has no time for.
  const collator = new Intl.Collator("en", { numeric: true, sensitivity: "base" });
  const sign = descending ? -1 : 1;
  return machines
    .map((machine) => [valueOf(machine, sort, islands), machine] as const)
    .sort(([one], [other]) => {
      if (one === null || other === null) return Number(one === null) - Number(other === null);
      return sign * (typeof one === "string" && typeof other === "string" ? collator.compare(one, other) : Number(one) - Number(other));
    })
    .map(([, machine]) => machine);
}
