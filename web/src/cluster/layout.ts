/**
 * Where everything stands on the map. A machine keeps its place as long as it stays in its island, and an island its
 * cell as long as most of its machines stay: who comes takes the first free place, who goes leaves one free.
 */

export interface Group {
  id: string;
  /** Ids, in the order they joined. */
  machines: readonly string[];
}

export interface Places {
  /** Cell of each group. */
  cells: ReadonlyMap<string, number>;
  /** Slot of each machine in its group. */
  slots: ReadonlyMap<string, number>;
  /** Cell of each machine's group, by which groups are known again. */
  homes: ReadonlyMap<string, number>;
}

export const NOWHERE: Places = { cells: new Map(), slots: new Map(), homes: new Map() };

/** Give every group a cell and every machine a slot, as near as possible to how it was before. */
export function settle(before: Places, groups: readonly Group[]): Places {
  const cells = new Map<string, number>();
  const slots = new Map<string, number>();
  const homes = new Map<string, number>();
  const taken = new Set<number>();
  const claims = groups.map((group) => ({ group, ...claimOf(before, group) }));
  for (const { group, cell } of [...claims].sort((a, b) => b.votes - a.votes)) {
    if (cell === undefined || taken.has(cell)) continue;
    cells.set(group.id, cell);
    taken.add(cell);
  }
  for (const { group } of claims) {
    if (!cells.has(group.id)) {
      const cell = firstFree(taken);
      cells.set(group.id, cell);
      taken.add(cell);
    }
    const cell = cells.get(group.id)!;
    const filled = new Set<number>();
    for (const id of group.machines) {
      const slot = before.slots.get(id);
      homes.set(id, cell);
      if (slot === undefined || before.homes.get(id) !== cell || filled.has(slot)) continue;
      slots.set(id, slot);
      filled.add(slot);
    }
    for (const id of group.machines) {
      if (slots.has(id)) continue;
      const slot = firstFree(filled);
      slots.set(id, slot);
      filled.add(slot);
    }
  }
  return { cells, slots, homes };
}

/** The cell that most machines of a group stood in. */
function claimOf(before: Places, group: Group): { cell: number | undefined; votes: number } {
  const votes = new Map<number, number>();
  for (const id of group.machines) {
    const home = before.homes.get(id);
    if (home !== undefined) votes.set(home, (votes.get(home) ?? 0) + 1);
  }
  const [cell, most] = [...votes].reduce<[number | undefined, number]>(
    (best, one) => (one[1] > best[1] ? one : best),
    [undefined, 0],
  );
  return { cell, votes: most };
}

function firstFree(taken: ReadonlySet<number>): number {
  let place = 0;
  while (taken.has(place)) place += 1;
  return place;
}

export interface Point {
  x: number;
  y: number;
}

/** Rings around the middle that hold this many slots: one in the middle, then 6, 12, 18, ... */
export function ringsFor(slots: number): number {
  let rings = 0;
  while (1 + 3 * rings * (rings + 1) < slots) rings += 1;
  return rings;
}

/** Where a slot is, in distances between neighbours: a hexagonal spiral from the middle outwards. */
export function spiral(slot: number): Point {
  if (slot === 0) return { x: 0, y: 0 };
  const ring = ringsFor(slot + 1);
  const order = slot - (1 + 3 * ring * (ring - 1));
  // Opposite places are taken one after the other, so that few machines stand around the middle.
  const place = (order >> 1) + (order & 1) * 3 * ring;
  const side = Math.floor(place / ring);
  const along = (place % ring) / ring;
  const corner = (number: number): Point => ({
    x: ring * Math.cos((number * Math.PI) / 3),
    y: ring * Math.sin((number * Math.PI) / 3),
  });
  const [from, to] = [corner(side), corner(side + 1)];
  return { x: from.x + (to.x - from.x) * along, y: from.y + (to.y - from.y) * along };
}

export interface Circle extends Point {
  r: number;
}

/** Put circles into rows of a width, in order; a row is as high as its largest. Returns them, and the height of all. */
export function inRows(
  radii: readonly number[],
  width: number,
  { gap, above }: { gap: number; above: number },
): { circles: Circle[]; height: number } {
  const rows: { radii: number[]; width: number }[] = [];
  for (const r of radii) {
    const row = rows.at(-1);
    if (row !== undefined && row.width + gap + 2 * r <= width) {
      row.radii.push(r);
      row.width += gap + 2 * r;
    } else rows.push({ radii: [r], width: 2 * r });
  }
  const circles: Circle[] = [];
  let y = 0;
  for (const row of rows) {
    const most = Math.max(...row.radii);
    // What is left of the width goes between them, so that few islands stand apart and not in a corner.
    const space = (width - row.width) / (row.radii.length + 1);
    let x = space;
    for (const r of row.radii) {
      circles.push({ x: x + r, y: y + above + most, r });
      x += 2 * r + gap + space;
    }
    y += above + 2 * most + gap;
  }
  return { circles, height: y };
}

/** The part of a line between two circles that is outside both; null where they touch. */
export function between(one: Circle, other: Circle): [Point, Point] | null {
  const [dx, dy] = [other.x - one.x, other.y - one.y];
  const length = Math.hypot(dx, dy);
  if (length <= one.r + other.r) return null;
  return [
    { x: one.x + (dx * one.r) / length, y: one.y + (dy * one.r) / length },
    { x: other.x - (dx * other.r) / length, y: other.y - (dy * other.r) / length },
  ];
}

export type Quality = "good" | "fair" | "poor" | "none";

/** How good a link is for training: as fast as a LAN, as a good line, or less. */
export function qualityOf(bytesPerS: number | null | undefined): Quality {
  if (bytesPerS == null || bytesPerS <= 0) return "none";
  return bytesPerS >= 1e8 ? "good" : bytesPerS >= 1e7 ? "fair" : "poor";
}

/** Width of a link's line in pixels: one more for each factor of ten above 100 kB/s. */
export function thickness(bytesPerS: number): number {
  return bytesPerS <= 0 ? 1 : Math.min(6, Math.max(1, Math.log10(bytesPerS) - 4));
}
