/**
 * Positions on the map. A machine keeps its slot while it stays in its island, and an island keeps its cell while most
 * of its machines stay. New machines and islands take the first free position; those that leave free their positions.
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
  /** Cell of each machine's group; it identifies groups after a change. */
  homes: ReadonlyMap<string, number>;
}

export const NOWHERE: Places = { cells: new Map(), slots: new Map(), homes: new Map() };

/** Assign a cell to every group and a slot to every machine, with as few changes as possible. */
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

/** The cell in which most machines of a group were before. */
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

/** Number of rings around the middle for this many slots: one in the middle, then 6, 12, 18, ... */
export function ringsFor(slots: number): number {
  let rings = 0;
  while (1 + 3 * rings * (rings + 1) < slots) rings += 1;
  return rings;
}

/** Position of a slot, in units of the distance between neighbours: a hexagonal spiral from the middle outwards. */
export function spiral(slot: number): Point {
  if (slot === 0) return { x: 0, y: 0 };
  const ring = ringsFor(slot + 1);
  const order = slot - (1 + 3 * ring * (ring - 1));
  // Opposite positions are filled one after the other, so that a few machines are spread evenly around the middle.
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

/** Up to this number, machines are placed at the corners of a regular polygon. */
const MOST_CORNERS = 6;

/** Distance of the outermost of several places from the middle, in units of the distance between neighbours. */
export function reachOf(places: number): number {
  if (places <= 1) return 0;
  return places <= MOST_CORNERS ? 0.5 / Math.sin(Math.PI / places) : ringsFor(places);
}

/** Position of a slot, in units of the distance between neighbours: symmetric for a few places, a spiral for more. */
export function position(slot: number, places: number): Point {
  if (places <= 1 || places > MOST_CORNERS) return spiral(slot);
  // An odd number has a corner at the top, an even number a horizontal side.
  const start = places === 2 ? Math.PI : -Math.PI / 2 - (places % 2 === 0 ? Math.PI / places : 0);
  const angle = start + (2 * Math.PI * slot) / places;
  const radius = reachOf(places);
  return { x: radius * Math.cos(angle), y: radius * Math.sin(angle) };
}

export interface Circle extends Point {
  r: number;
}

/**
 * Put circles into rows of a given width, in order; a row is as high as its largest circle. Also returns the total
 * height.
 */
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
    // The remaining width is divided between the circles, so that a few islands are spread out.
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

/** The largest of some sizes (largest first) whose layout is at most `limit` high; the smallest size if none is. */
export function largestThatFits(sizes: readonly number[], limit: number, heightWith: (size: number) => number): number {
  return sizes.find((size) => heightWith(size) <= limit) ?? sizes.at(-1)!;
}

/** The part of the line between two circles that is outside both; null if they touch. */
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

/** Quality of a link for training: like a LAN, like a good WAN line, or less. */
export function qualityOf(bytesPerS: number | null | undefined): Quality {
  if (bytesPerS == null || bytesPerS <= 0) return "none";
  return bytesPerS >= 1e8 ? "good" : bytesPerS >= 1e7 ? "fair" : "poor";
}

/** Line width of a link in pixels: one pixel more for each factor of ten above 100 kB/s. */
export function thickness(bytesPerS: number): number {
  return bytesPerS <= 0 ? 1 : Math.min(6, Math.max(1, Math.log10(bytesPerS) - 4));
}
