/** The cluster as a picture: islands of machines with good links between them, and the links between islands. */
import { Text } from "@mantine/core";
import { useCallback, useMemo, useState } from "react";
import { useTranslation } from "react-i18next";

import type { ClusterView } from "../api/types";
import { AnchorLink } from "../components/links";
import { useWidth } from "../components/chart/useWidth";
import { count } from "../format";
import { Bubble } from "./Bubble";
import { Details } from "./Details";
import type { MachineGroup } from "./groups";
import { between, inRows, qualityOf, ringsFor, spiral, thickness, type Circle, type Places } from "./layout";
import { Legend } from "./Legend";
import { MachineNode } from "./MachineNode";
import classes from "./ClusterMap.module.css";
import { clusterSearch } from "./search";
import { groupTitle, linkWords, qualityWords } from "./words";

/** Above this number of machines, islands are drawn as circles that can be opened. */
export const MOST_DRAWN = 150;
/** Machines that an open island shows: ten full rings. */
const MOST_OPEN = 331;
/** Up to this number, names fit under the machines. */
const MOST_NAMED = 60;
const WIDE = 98;
const NARROW = 46;
const ABOVE = 48;
const GAP = 40;

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
  isBubble: boolean;
}

export function ClusterMap({ cluster, groups, places, numbers, open }: Props) {
  const { t } = useTranslation();
  const { ref, width } = useWidth<HTMLDivElement>();
  const [lit, setLit] = useState<string | null>(null);
  const light = useCallback((id: string | null) => setLit(id), []);
  const opened = groups.find((group) => group.id === open);
  const shown = opened === undefined ? groups : [opened];
  const total = groups.reduce((sum, group) => sum + group.machines.length, 0);
  const hasBubbles = opened === undefined && total > MOST_DRAWN;
  const { drawn, height } = useMemo(
    () => draw(shown, places, numbers, width, hasBubbles),
    // `shown` is a new object on each render; its parts are not.
    [groups, opened, places, numbers, width, hasBubbles],
  );
  const litMachine = lit === null ? undefined : cluster.machines.find((machine) => machine.id === lit);
  return (
    <section className="card" aria-label={t("Map of the machines")}>
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
      <div ref={ref} className={classes.frame}>
        {width > 0 && (
          <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`} className={classes.map} role="group" aria-label={t("Machines and islands")}>
            <Links cluster={cluster} drawn={drawn} />
            {drawn.map((one) =>
              one.isBubble ? (
                <Bubble key={one.group.id} group={one.group} number={one.number} x={one.circle.x} y={one.circle.y} radius={one.circle.r} />
              ) : (
                <Island key={one.group.id} {...one} places={places} onLight={light} />
              ),
            )}
          </svg>
        )}
      </div>
      <Details machine={litMachine} hasBubbles={hasBubbles} />
      <Legend hasBubbles={hasBubbles} isAssumed={cluster.islands.is_assumed} isCurrent={cluster.islands.is_current} />
      <LinkList cluster={cluster} numbers={numbers} />
    </section>
  );
}

function draw(
  shown: readonly MachineGroup[],
  places: Props["places"],
  numbers: Props["numbers"],
  width: number,
  hasBubbles: boolean,
): { drawn: Drawn[]; height: number } {
  const cell = (group: MachineGroup) =>
    group.kind === "island" ? (places.islands.cells.get(group.id) ?? 0) : 1e6 + (group.kind === "gone" ? 1 : 0);
  const ordered = [...shown].sort((a, b) => cell(a) - cell(b));
  const total = ordered.reduce((sum, group) => sum + group.machines.length, 0);
  const sized = ordered.map((group) => {
    if (hasBubbles) {
      const r = Math.min(width / 2 - 8, Math.max(58, Math.min(120, 14 * Math.sqrt(Math.sqrt(group.machines.length) * 3))));
      return { r, step: 0 };
    }
    const slots = group.kind === "island" ? places.islands.slots : places.others.slots;
    const most = Math.max(...group.machines.slice(0, MOST_OPEN).map((machine) => slots.get(machine.id) ?? 0));
    const rings = ringsFor(most + 1);
    const fits = (width - 64) / Math.max(1, 2 * rings + 0.5);
    const step = Math.max(20, Math.min(total <= MOST_NAMED ? WIDE : NARROW, fits));
    return { r: rings * step + Math.max(26, step * 0.55), step };
  });
  const { circles, height } = inRows(sized.map(({ r }) => r), Math.max(width, 1), { gap: GAP, above: ABOVE });
  const drawn = ordered.map((group, place) => ({
    group,
    circle: circles[place]!,
    number: numbers.get(group.id) ?? 0,
    step: sized[place]!.step,
    isBubble: hasBubbles,
  }));
  return { drawn, height };
}

function Island({ group, circle, number, step, places, onLight }: Drawn & { places: Props["places"]; onLight: (id: string | null) => void }) {
  const { t } = useTranslation();
  const slots = group.kind === "island" ? places.islands.slots : places.others.slots;
  const quality = qualityOf(group.island?.bytes_per_s);
  const inside = group.island?.bytes_per_s != null ? linkWords(group.island.latency_s, group.island.bytes_per_s) : null;
  return (
    <g>
      <circle
        className={classes.shore}
        style={{ transform: `translate(${circle.x}px, ${circle.y}px)` }}
        r={circle.r}
        data-quality={quality}
        data-kind={group.kind}
      />
      <text className={classes.title} data-halo x={circle.x} y={circle.y - circle.r - 24}>
        {groupTitle(t, group, number)}
      </text>
      <text className={classes.caption} data-halo x={circle.x} y={circle.y - circle.r - 8}>
        {inside ?? t("{{count}} machines", { count: group.machines.length })}
      </text>
      {group.machines.slice(0, MOST_OPEN).map((machine) => {
        const place = spiral(slots.get(machine.id) ?? 0);
        return (
          <MachineNode
            key={machine.id}
            machine={machine}
            x={circle.x + place.x * step}
            y={circle.y + place.y * step}
            spacing={step}
            onLight={onLight}
          />
        );
      })}
    </g>
  );
}

/** Lines between islands; labels are placed where no island hides them. */
function Links({ cluster, drawn }: { cluster: ClusterView; drawn: readonly Drawn[] }) {
  const circles = new Map(drawn.map(({ group, circle }) => [group.id, circle]));
  return (
    <g aria-hidden>
      {cluster.islands.links.map(({ one, other, latency_s: latencyS, bytes_per_s: bytesPerS }) => {
        const ends = [circles.get(one), circles.get(other)] as const;
        const line = ends[0] && ends[1] && between(ends[0], ends[1]);
        if (!line) return null;
        const [from, to] = line;
        const middle = { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 };
        const isRoom = Math.hypot(to.x - from.x, to.y - from.y) > 104;
        const isHidden = drawn.some(({ circle }) => Math.hypot(circle.x - middle.x, circle.y - middle.y) < circle.r + 30);
        return (
          <g key={`${one} ${other}`}>
            <line
              className={classes.link}
              data-quality={qualityOf(bytesPerS)}
              x1={from.x}
              y1={from.y}
              x2={to.x}
              y2={to.y}
              strokeWidth={thickness(bytesPerS)}
            />
            {isRoom && !isHidden && (
              <text className={classes.caption} data-halo x={middle.x} y={middle.y - 6}>
                {linkWords(latencyS, bytesPerS)}
              </text>
            )}
          </g>
        );
      })}
    </g>
  );
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
