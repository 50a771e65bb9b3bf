/** Lines of the map: which machines they join, and their parts outside labels. */
import type { MachineSummary } from "../api/types";
import { between, type Circle, type Point } from "./layout";

export interface Line {
  from: Point;
  to: Point;
}

export interface Size {
  width: number;
  height: number;
}

export interface Box extends Point, Size {}

/** The interval of a line inside a box, as parts of its length; null if it misses the box (Liang and Barsky, 1984). */
function within({ from, to }: Line, box: Box): [number, number] | null {
  let [enter, leave] = [0, 1];
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const edges = [
    [-dx, from.x - box.x],
    [dx, box.x + box.width - from.x],
    [-dy, from.y - box.y],
    [dy, box.y + box.height - from.y],
  ] as const;
  for (const [along, distance] of edges) {
    if (along === 0) {
      if (distance < 0) return null;
    } else if (along < 0) enter = Math.max(enter, distance / along);
    else leave = Math.min(leave, distance / along);
  }
  return enter < leave ? [enter, leave] : null;
}

/** The parts of a line outside all boxes, in order. */
export function outside(line: Line, boxes: readonly Box[]): Line[] {
  const hidden = boxes.flatMap((box) => {
    const found = within(line, box);
    return found === null ? [] : [found];
  });
  hidden.sort((a, b) => a[0] - b[0]);
  const at = (part: number): Point => ({
    x: line.from.x + (line.to.x - line.from.x) * part,
    y: line.from.y + (line.to.y - line.from.y) * part,
  });
  const parts: Line[] = [];
  let end = 0;
  for (const [enter, leave] of [...hidden, [1, 1] as const]) {
    if (enter > end) parts.push({ from: at(end), to: at(enter) });
    end = Math.max(end, leave);
  }
  return parts;
}

/** Pairs of places that are at most `reach` apart. */
export function neighbours(places: readonly Point[], reach: number): [number, number][] {
  const pairs: [number, number][] = [];
  for (let one = 0; one < places.length; one += 1) {
    for (let other = one + 1; other < places.length; other += 1) {
      const [a, b] = [places[one]!, places[other]!];
      if (Math.hypot(a.x - b.x, a.y - b.y) <= reach) pairs.push([one, other]);
    }
  }
  return pairs;
}

/** A line between machines of consecutive stages of a job or deployment. */
export interface Flow {
  from: string;
  to: string;
  /** Id of the job or deployment. */
  holder: string;
}

/**
 * Lines between the machines of consecutive stages. A machine of a job exchanges tensors with all members of the next
 * stage; each gets at least one line. If a deployment has several machines for a stage, the data does not show which
 * machines form a replica, so it gets no lines.
 */
export function flowsOf(machines: readonly Pick<MachineSummary, "id" | "held">[]): Flow[] {
  const stagesOf = new Map<string, Map<number, string[]>>();
  for (const { id, held } of machines) {
    const holder = held?.job_id ?? held?.deployment_id;
    if (holder == null || held?.stage == null) continue;
    const stages = stagesOf.get(holder) ?? new Map<number, string[]>();
    stagesOf.set(holder, stages.set(held.stage, [...(stages.get(held.stage) ?? []), id]));
  }
  const deployed = new Set(machines.map(({ held }) => held?.deployment_id));
  return [...stagesOf].flatMap(([holder, stages]) => {
    if (deployed.has(holder) && [...stages.values()].some((members) => members.length > 1)) return [];
    return [...stages].flatMap(([stage, members]) => {
      const next = stages.get(stage + 1) ?? [];
      const lines = next.length === 0 ? 0 : Math.max(members.length, next.length);
      return Array.from({ length: lines }, (_, place) => ({ from: members[place % members.length]!, to: next[place % next.length]!, holder }));
    });
  });
}

/**
 * Distance of a curve's middle from the straight line, as a fraction of the line's length; the smallest that works is
 * used.
 */
const BENDS = [0.12, -0.12, 0.2, -0.2, 0.3, -0.3, 0.4, -0.4, 0.5, -0.5];
const SAMPLES = 48;
const MARGIN = 8;
/** Distance of a curve from the edges of the picture: half of the widest line. */
const EDGE = 3;

/**
 * Points of a line between two islands that passes beside the others: straight if no island is in the way, or else a
 * curve inside the picture. Without such a curve, the straight line. Empty if the islands touch. @param boxes titles
 * that a curve must not cross.
 */
export function route(one: Circle, other: Circle, islands: readonly Circle[], boxes: readonly Box[], picture: Size): Point[] {
  const straight = between(one, other);
  if (straight === null) return [];
  const inner = { x: EDGE, y: EDGE, width: picture.width - 2 * EDGE, height: picture.height - 2 * EDGE };
  const others = islands.filter((island) => island !== one && island !== other);
  const isFree = (point: Point) => others.every((island) => Math.hypot(point.x - island.x, point.y - island.y) > island.r + MARGIN);
  const along = Array.from({ length: SAMPLES + 1 }, (_, place) => place / SAMPLES);
  const [dx, dy] = [other.x - one.x, other.y - one.y];
  const curve = (bend: number) =>
    along.map((part) => {
      const aside = 4 * bend * part * (1 - part);
      return { x: one.x + dx * part - dy * aside, y: one.y + dy * part + dx * aside };
    });
  const isBetween = (point: Point) => [one, other].every(({ x, y, r }) => Math.hypot(point.x - x, point.y - y) > r);
  if (curve(0).filter(isBetween).every(isFree)) return straight;
  for (const bend of BENDS) {
    const points = curve(bend).filter(isBetween);
    if (points.length > 1 && points.every((point) => contains(inner, point) && isFree(point) && !boxes.some((box) => contains(box, point)))) return points;
  }
  return straight;
}

/** Parts of a line's length at which its label may lie; the first that works is used. */
const LABEL_PLACES = [0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8];
/** Distance between a line's label and its edge. */
const LABEL_GAP = 2;

/**
 * Boxes beside a line, for its label: at several places, first above the line and then below. A box touches the line
 * only if the line bends towards it. @param points the line's points in order, at least two. @param width width of the
 * line's stroke.
 */
export function beside(points: readonly Point[], width: number, { width: long, height: high }: Size): Box[] {
  return LABEL_PLACES.flatMap((part) => {
    const at = part * (points.length - 1);
    const place = Math.min(Math.floor(at), points.length - 2);
    const [from, to] = [points[place]!, points[place + 1]!];
    const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
    const aside = { x: (to.y - from.y) / length, y: (from.x - to.x) / length };
    const away = (Math.abs(aside.x) * long + Math.abs(aside.y) * high + width) / 2 + LABEL_GAP;
    const middle = { x: from.x + (to.x - from.x) * (at - place), y: from.y + (to.y - from.y) * (at - place) };
    const boxes = [1, -1].map((side) => ({
      x: middle.x + side * away * aside.x - long / 2,
      y: middle.y + side * away * aside.y - high / 2,
      width: long,
      height: high,
    }));
    return boxes.sort((one, other) => one.y - other.y);
  });
}

/** Whether a line through some points crosses a box, or comes nearer to it than half of its stroke. */
export function crosses(points: readonly Point[], width: number, { x, y, width: long, height: high }: Box): boolean {
  const grown = { x: x - width / 2, y: y - width / 2, width: long + width, height: high + width };
  return points.slice(1).some((to, place) => within({ from: points[place]!, to }, grown) !== null);
}

/** Whether a box lies inside a picture. */
export function fits({ x, y, width, height }: Box, picture: Size): boolean {
  return x >= 0 && y >= 0 && x + width <= picture.width && y + height <= picture.height;
}

function contains(box: Box, { x, y }: Point): boolean {
  return x > box.x && x < box.x + box.width && y > box.y && y < box.y + box.height;
}

/** Whether two boxes overlap. */
export function overlap(one: Box, other: Box): boolean {
  return one.x < other.x + other.width && other.x < one.x + one.width && one.y < other.y + other.height && other.y < one.y + one.height;
}

/** Whether a box and a circle overlap. */
export function touches(box: Box, circle: Circle): boolean {
  const x = Math.max(box.x, Math.min(circle.x, box.x + box.width));
  const y = Math.max(box.y, Math.min(circle.y, box.y + box.height));
  return Math.hypot(circle.x - x, circle.y - y) < circle.r;
}
