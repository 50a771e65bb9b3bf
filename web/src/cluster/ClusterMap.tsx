/** The cluster as a picture: islands of machines with good links between them, and the links between islands. */
import { ActionIcon, Text } from "@mantine/core";
import { useCallback, useMemo, useState, useSyncExternalStore } from "react";
import { useTranslation } from "react-i18next";

import { useStepping } from "../api/events/stepping";
import type { ClusterView } from "../api/types";
import { AnchorLink } from "../components/links";
import { useWidth } from "../components/chart/useWidth";
import { count } from "../format";
import { Bubble } from "./Bubble";
import { Details } from "./Details";
import type { MachineGroup } from "./groups";
import { inRows, largestThatFits, position, qualityOf, reachOf, thickness, type Circle, type Places, type Point } from "./layout";
import { beside, crosses, fits, flowsOf, neighbours, outside, overlap, route, touches, type Box, type Size } from "./lines";
import { Legend } from "./Legend";
import { MachineNode, radiusOf, SPACING_FOR_LARGE, SPACING_FOR_NAMES, SPACING_FOR_WORK } from "./MachineNode";
import classes from "./ClusterMap.module.css";
import { clusterSearch } from "./search";
import { useUtilization, type Utilizations } from "./useUtilization";
import { busyOf, groupTitle, linkWords, qualityWords } from "./words";

/** Above this number of machines, islands are drawn as circles that can be opened. */
export const MOST_DRAWN = 150;
/** Maximum number of machines that an open island shows: ten full rings. */
const MOST_OPEN = 331;
/** Distances between two machines in pixels; the largest with which all islands fit is used. */
const STEPS = [208, 186, 166, 152, 140, 124, 110, 98, 90, 84, 76, 68, 60, 52, 46, 40, 34, 28, 24];
const ZOOMS = [1, 1.5, 2, 3];
/** Height of the page above and below the map, without its legend. */
const TAKEN = 400;
const LEAST_HEIGHT = 340;
const ABOVE = 48;
const GAP = 40;
const MOST_STAGGER = 80;
/** Radius of an island with a single machine, large enough for the machine's name. */
const LEAST_NAMED = 50;
/** Parts of a line between two labels that are shorter than this are left out. */
const SHORTEST_PART = 14;
/** Width of a letter of a name. */
const LETTER = 7;
const LARGE_LETTER = 8;
/** Width of a letter of a link's figures. */
const SMALL_LETTER = 6;
const LABEL_HEIGHT = 14;
/** Distance of the baseline of a link's figures from the top of their box. */
const LABEL_BASELINE = 11;
/** With more islands than this, links do not bend around islands. */
const MOST_AROUND = 24;

interface Props {
  cluster: ClusterView;
  groups: readonly MachineGroup[];
  places: { islands: Places; others: Places };
  numbers: ReadonlyMap<string, number>;
  open: string | undefined;
}

interface Drawn {
  group: MachineGroup;
  circle: Circle;
  number: number;
  /** Distance between two machines. */
  step: number;
  /** Position of each machine, in the order of the group. */
  points: readonly Point[];
  isBubble: boolean;
}

export function ClusterMap({ cluster, groups, places, numbers, open }: Props) {
  const { t } = useTranslation();
  const { ref, width } = useWidth<HTMLDivElement>();
  const room = Math.max(LEAST_HEIGHT, useWindowHeight() - TAKEN);
  const [zoom, setZoom] = useState(0);
  const scale = ZOOMS[zoom]!;
  const [lit, setLit] = useState<string | null>(null);
  const light = useCallback((id: string | null) => setLit(id), []);
  const opened = groups.find((group) => group.id === open);
  const shown = opened === undefined ? groups : [opened];
  const total = groups.reduce((sum, group) => sum + group.machines.length, 0);
  const hasBubbles = opened === undefined && total > MOST_DRAWN;
  const { drawn, height } = useMemo(
    () => draw(shown, places, numbers, { width: width * scale, height: room * scale }, hasBubbles),
    // `shown` is a new object on each render, but its parts are not.
    [groups, opened, places, numbers, width, room, scale, hasBubbles],
  );
  const labels = useMemo(() => drawn.flatMap(labelsOf), [drawn]);
  const used = useUtilization();
  const litMachine = lit === null ? undefined : cluster.machines.find((machine) => machine.id === lit);
  return (
    <section className={`card ${classes.board}`} aria-label={t("Map of the machines")}>
      {opened !== undefined && (
        <div className={classes.opened}>
          <AnchorLink to="/" search={(old) => clusterSearch({ ...old, island: undefined })} size="sm">
            {t("All islands")}
          </AnchorLink>
          <Text size="sm" fw={600}>
            {groupTitle(t, opened, numbers.get(opened.id) ?? 0)}
          </Text>
          {opened.machines.length > MOST_OPEN && (
            <AnchorLink to="/" search={(old) => clusterSearch({ ...old, view: "table" })} size="sm">
              {t("{{shown}} of {{count}} machines are drawn; the table has all", {
                shown: count(MOST_OPEN),
                count: opened.machines.length,
              })}
            </AnchorLink>
          )}
        </div>
      )}
      <div ref={ref} className={classes.frame} data-zoomed={zoom > 0} style={zoom > 0 ? { maxHeight: room } : undefined}>
        {width > 0 && (
          <svg width={width * scale} height={height} viewBox={`0 0 ${width * scale} ${height}`} className={classes.map} role="group" aria-label={t("Machines and islands")}>
            <Links cluster={cluster} drawn={drawn} labels={labels} width={width * scale} height={height} />
            <Shores drawn={drawn} />
            <Inside drawn={drawn} labels={labels} />
            {drawn.map((one) =>
              one.isBubble ? (
                <Bubble key={one.group.id} group={one.group} number={one.number} x={one.circle.x} y={one.circle.y} radius={one.circle.r} />
              ) : (
                <Island key={one.group.id} {...one} used={used} onLight={light} />
              ),
            )}
          </svg>
        )}
      </div>
      <div className={classes.zoom} role="group" aria-label={t("Zoom")}>
        <ActionIcon variant="default" aria-label={t("Zoom out")} disabled={zoom === 0} onClick={() => setZoom(zoom - 1)}>
          −
        </ActionIcon>
        <ActionIcon variant="default" aria-label={t("Zoom in")} disabled={zoom === ZOOMS.length - 1} onClick={() => setZoom(zoom + 1)}>
          +
        </ActionIcon>
      </div>
      <Details machines={cluster.machines} machine={litMachine} utilizations={used} hasBubbles={hasBubbles} />
      <Legend hasBubbles={hasBubbles} isAssumed={cluster.islands.is_assumed} isCurrent={cluster.islands.is_current} />
      <LinkList cluster={cluster} numbers={numbers} />
    </section>
  );
}

function draw(
  shown: readonly MachineGroup[],
  places: Props["places"],
  numbers: Props["numbers"],
  room: { width: number; height: number },
  hasBubbles: boolean,
): { drawn: Drawn[]; height: number } {
  const cell = (group: MachineGroup) =>
    group.kind === "island" ? (places.islands.cells.get(group.id) ?? 0) : 1e6 + (group.kind === "gone" ? 1 : 0);
  const ordered = [...shown].sort((a, b) => cell(a) - cell(b));
  const slots = ordered.map((group) => {
    const known = group.kind === "island" ? places.islands.slots : places.others.slots;
    return group.machines.slice(0, MOST_OPEN).map((machine) => known.get(machine.id) ?? 0);
  });
  const counts = slots.map((some) => Math.max(...some) + 1);
  const radii = (step: number) =>
    hasBubbles
      ? ordered.map(({ machines }) => Math.min(room.width / 2 - 8, Math.max(58, Math.min(120, 14 * Math.sqrt(Math.sqrt(machines.length) * 3)))))
      : counts.map((count) => reachOf(count) * step + Math.max(step >= SPACING_FOR_NAMES ? LEAST_NAMED : 26, Math.min(96, step * 0.66)));
  const rows = (step: number) => inRows(radii(step), Math.max(room.width, 1), { gap: GAP, above: ABOVE });
  const isNarrow = (step: number) => Math.max(...radii(step)) * 2 > room.width;
  const step = largestThatFits(STEPS, room.height, (size) => (isNarrow(size) ? Infinity : rows(size).height));
  const { circles, height } = rows(step);
  // A few islands are centred in the map's height.
  const down = Math.max(0, (room.height - height) / 2);
  // Three islands in one line would hide the link between the outer ones.
  const isOneRow = circles.length > 2 && circles.every(({ y }) => y === circles[0]!.y);
  const stagger = isOneRow ? Math.min(down, MOST_STAGGER) : 0;
  const drawn = ordered.map((group, place) => {
    const circle = { ...circles[place]!, y: circles[place]!.y + down + (place % 2 === 0 ? -stagger : stagger) };
    const points = slots[place]!.map((slot) => {
      const { x, y } = position(slot, counts[place]!);
      return { x: circle.x + x * step, y: circle.y + y * step };
    });
    return { group, circle, number: numbers.get(group.id) ?? 0, step, points, isBubble: hasBubbles };
  });
  return { drawn, height: Math.max(height, room.height) };
}

/** The boxes of an island's title and of the names of its machines; lines must not cross these boxes. */
function labelsOf({ group, circle, step, points, isBubble }: Drawn): Box[] {
  if (isBubble) return []; // its title is inside the circle
  const title = { x: circle.x - 75, y: circle.y - circle.r - 40, width: 150, height: 38 };
  if (step < SPACING_FOR_NAMES) return [title];
  const hasWork = step >= SPACING_FOR_WORK;
  const names = points.map(({ x, y }, place) => {
    const machine = group.machines[place]!;
    const letters = Math.max(machine.name.length, hasWork ? (machine.held?.name ?? machine.state).length : 0);
    const isLarge = step >= SPACING_FOR_LARGE;
    const width = Math.min(step * 0.88, letters * (isLarge ? LARGE_LETTER : LETTER) + 8);
    return { x: x - width / 2, y: y + radiusOf(machine, step) + 7, width, height: hasWork ? (isLarge ? 37 : 32) : 16 };
  });
  return [title, ...names];
}

/** The coasts of islands, below all lines. */
function Shores({ drawn }: { drawn: readonly Drawn[] }) {
  return drawn.map(({ group, circle, isBubble }) =>
    isBubble ? null : (
      <circle
        key={group.id}
        className={classes.shore}
        style={{ transform: `translate(${circle.x}px, ${circle.y}px)` }}
        r={circle.r}
        data-quality={qualityOf(group.island?.bytes_per_s)}
        data-kind={group.kind}
      />
    ),
  );
}

/** Lines between the machines of an island, and from stage to stage; the lines move while their job commits steps. */
function Inside({ drawn, labels }: { drawn: readonly Drawn[]; labels: readonly Box[] }) {
  const stepping = useStepping();
  const { mesh, flows } = useMemo(() => {
    const open = drawn.filter((one) => !one.isBubble);
    const places = new Map(open.flatMap(({ group, points }) => points.map((point, place) => [group.machines[place]!.id, point] as const)));
    const near = open.flatMap(({ group, points, step }) =>
      group.kind !== "island"
        ? []
        : neighbours(points, step * 1.05).map(([one, other]) => ({ line: { from: points[one]!, to: points[other]! }, quality: qualityOf(group.island?.bytes_per_s) })),
    );
    return {
      mesh: near.flatMap(({ line, quality }) => outside(line, labels).map((part) => ({ part, quality }))),
      flows: flowsOf(open.flatMap(({ group }) => group.machines)).flatMap((flow) => {
        const [from, to] = [places.get(flow.from), places.get(flow.to)];
        return from === undefined || to === undefined ? [] : outside({ from, to }, labels).map((part) => ({ part, holder: flow.holder }));
      }),
    };
  }, [drawn, labels]);
  return (
    <g aria-hidden>
      {mesh.map(({ part: { from, to }, quality }, place) => (
        <line key={place} className={classes.mesh} data-quality={quality} x1={from.x} y1={from.y} x2={to.x} y2={to.y} />
      ))}
      {flows.map(({ part: { from, to }, holder }, place) => (
        <line key={place} className={classes.flow} data-moving={stepping.has(holder)} x1={from.x} y1={from.y} x2={to.x} y2={to.y} />
      ))}
    </g>
  );
}

function Island({ group, circle, number, step, points, used, onLight }: Drawn & { used: Utilizations; onLight: (id: string | null) => void }) {
  const { t } = useTranslation();
  const inside = group.island?.bytes_per_s != null ? linkWords(group.island.latency_s, group.island.bytes_per_s) : null;
  return (
    <g>
      <text className={classes.title} data-halo x={circle.x} y={circle.y - circle.r - 24}>
        {groupTitle(t, group, number)}
      </text>
      <text className={classes.caption} data-halo x={circle.x} y={circle.y - circle.r - 8}>
        {inside ?? t("{{count}} machines", { count: group.machines.length })}
      </text>
      {points.map((point, place) => {
        const machine = group.machines[place]!;
        return (
          <MachineNode key={machine.id} machine={machine} x={point.x} y={point.y} spacing={step} busy={group.kind === "gone" ? undefined : busyOf(used[machine.id])} onLight={onLight} />
        );
      })}
    </g>
  );
}

/**
 * Lines between islands, which pass beside other islands. A label is placed beside its line where it covers no island,
 * no line and no other label.
 */
function Links({ cluster, drawn, labels, width, height }: { cluster: ClusterView; drawn: readonly Drawn[]; labels: readonly Box[] } & Size) {
  const { links } = cluster.islands;
  const lines = useMemo(() => routed(links, drawn, labels, { width, height }), [links, drawn, labels, width, height]);
  return (
    <g aria-hidden>
      {lines.map(({ id, parts, quality, width }) =>
        parts.map((points, place) => (
          <polyline key={`${id} ${place}`} className={classes.link} data-quality={quality} points={points.map(({ x, y }) => `${x},${y}`).join(" ")} strokeWidth={width} />
        )),
      )}
      {lines.map(({ id, label }) =>
        label === null ? null : (
          <text key={id} className={classes.caption} data-halo x={label.x} y={label.y}>
            {label.text}
          </text>
        ),
      )}
    </g>
  );
}

function routed(links: ClusterView["islands"]["links"], drawn: readonly Drawn[], labels: readonly Box[], picture: Size) {
  const circles = new Map(drawn.map(({ group, circle }) => [group.id, circle]));
  const islands = drawn.length > MOST_AROUND ? [] : [...circles.values()];
  const lines = links.flatMap(({ one, other, latency_s: latencyS, bytes_per_s: bytesPerS }) => {
    const ends = [circles.get(one), circles.get(other)] as const;
    const points = ends[0] && ends[1] ? route(ends[0], ends[1], islands, labels, picture) : [];
    if (points.length < 2) return [];
    const [first, last] = [points[0]!, points.at(-1)!];
    const visible = outside({ from: first, to: last }, labels).filter(({ from, to }) => Math.hypot(to.x - from.x, to.y - from.y) >= SHORTEST_PART);
    const parts = points.length > 2 ? [points] : visible.map(({ from, to }) => [from, to]);
    return [{ id: `${one} ${other}`, points, parts, text: linkWords(latencyS, bytesPerS), quality: qualityOf(bytesPerS), width: thickness(bytesPerS) }];
  });
  const strokes = lines.flatMap(({ parts, width }) => parts.map((points) => ({ points, width })));
  const taken = [...labels];
  const isFree = (box: Box) =>
    fits(box, picture) &&
    !drawn.some(({ circle }) => touches(box, circle)) &&
    !taken.some((label) => overlap(label, box)) &&
    !strokes.some(({ points, width }) => crosses(points, width, box));
  return lines.map(({ points, text, ...line }) => {
    const box = beside(points, line.width, { width: text.length * SMALL_LETTER, height: LABEL_HEIGHT }).find(isFree);
    if (box !== undefined) taken.push(box);
    return { ...line, label: box === undefined ? null : { x: box.x + box.width / 2, y: box.y + LABEL_BASELINE, text } };
  });
}

function useWindowHeight(): number {
  return useSyncExternalStore(onResize, () => innerHeight);
}

function onResize(listener: () => void): () => void {
  addEventListener("resize", listener);
  return () => removeEventListener("resize", listener);
}

/** The links as a list of sentences. */
function LinkList({ cluster, numbers }: { cluster: ClusterView; numbers: ReadonlyMap<string, number> }) {
  const { t } = useTranslation();
  const { islands, links } = cluster.islands;
  if (islands.length < 2) return null;
  return (
    <details className={classes.links}>
      <summary>{t("{{count}} links between islands", { count: links.length })}</summary>
      <ul>
        {links.map((link) => (
          <li key={`${link.one} ${link.other}`}>
            <span>{t("Island {{number}}", { number: numbers.get(link.one) ?? 0 })}</span>
            {" – "}
            <span>{t("Island {{number}}", { number: numbers.get(link.other) ?? 0 })}</span>
            {": "}
            {linkWords(link.latency_s, link.bytes_per_s)}, {qualityWords(t, qualityOf(link.bytes_per_s))}
          </li>
        ))}
      </ul>
    </details>
  );
}
