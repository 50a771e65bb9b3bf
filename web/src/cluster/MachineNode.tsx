/** One machine of the map: size by speed, shape by device, sign and colour by state, a ring for its memory. */
import { Link } from "@tanstack/react-router";
import { memo, type CSSProperties } from "react";
import { useTranslation } from "react-i18next";

import { isGone, type MachineSummary } from "../api/types";
import classes from "./ClusterMap.module.css";
import { describe, shareText, workWords } from "./words";

interface Props {
  machine: MachineSummary;
  x: number;
  y: number;
  /** Distance to its neighbours, in pixels. */
  spacing: number;
  /** Fraction in use of its lent GPU or threads, if it was measured. */
  busy: number | undefined;
  onLight: (id: string | null) => void;
}

/** With less spacing names would overlap. */
export const SPACING_FOR_NAMES = 60;
/** With less spacing than this, the second line (the machine's work) is left out. */
export const SPACING_FOR_WORK = 84;

/** With this spacing or more, names and figures are larger. */
export const SPACING_FOR_LARGE = 150;

export type Tone = "working" | "free" | "arriving" | "leaving" | "lost" | "left";

export function toneOf(machine: Pick<MachineSummary, "state" | "held">): Tone {
  if (isGone(machine)) return machine.state === "lost" ? "lost" : "left";
  if (machine.state === "draining" || machine.state === "quarantined") return "leaving";
  if (machine.state !== "ready") return "arriving";
  return machine.held === null ? "free" : "working";
}

/**
 * Radius from 10 to 40 pixels: 1.5 times as large for each factor of a hundred above 10 GFLOP/s, and larger if there is
 * space.
 */
export function radiusOf(machine: Pick<MachineSummary, "flops_per_s">, spacing: number): number {
  const size = machine.flops_per_s > 0 ? 14 + 3 * Math.log10(Math.max(1, machine.flops_per_s / 1e10)) : 13;
  const hasOnlyName = spacing >= SPACING_FOR_NAMES && spacing < SPACING_FOR_WORK;
  return Math.min(40, size * Math.max(1, spacing / 110), spacing * (hasOnlyName ? 0.24 : 0.36));
}

export const MachineNode = memo(function MachineNode({ machine, x, y, spacing, busy, onLight }: Props) {
  const { t } = useTranslation();
  const r = radiusOf(machine, spacing);
  const tone = toneOf(machine);
  // A square has the area of the circle, and its corners stay inside the ring.
  const half = 0.87 * r;
  const ring = r + 3.5;
  const around = 2 * Math.PI * ring;
  const used = machine.held?.memory_bytes ?? 0;
  const share = machine.lent_bytes > 0 ? Math.min(1, used / machine.lent_bytes) : 0;
  const isLarge = spacing >= SPACING_FOR_LARGE;
  const letters = Math.floor(spacing / (isLarge ? 8 : 7));
  return (
    <g className={classes.mover} style={{ transform: `translate(${x}px, ${y}px)` }}>
      <g className={classes.appearing}>
        <Link
          to="/machines/$machineId"
          params={{ machineId: machine.id }}
          preload={false}
          className={classes.node}
          data-tone={tone}
          {...((tone === "working" || tone === "free") && busy !== undefined && { "data-busy": busy >= 0.5 ? "high" : "low", style: { "--busy": `${Math.round(10 + 80 * busy)}%` } as CSSProperties })}
          aria-label={busy === undefined ? describe(t, machine) : `${describe(t, machine)}, ${t("{{share}} in use", { share: shareText(busy) })}`}
          onPointerEnter={() => onLight(machine.id)}
          onFocus={() => onLight(machine.id)}
        >
          <circle className={classes.target} r={Math.max(ring, 12)} />
          {machine.kind !== null && machine.kind !== "cpu" ? (
            <rect className={classes.body} x={-half} y={-half} width={2 * half} height={2 * half} rx={half * 0.3} />
          ) : (
            <circle className={classes.body} r={r} />
          )}
          {used > 0 && <circle className={classes.track} r={ring} />}
          {share > 0 && (
            <circle
              className={classes.memory}
              r={ring}
              strokeDasharray={`${around} ${around}`}
              strokeDashoffset={around * (1 - Math.max(0.02, share))}
              transform="rotate(-90)"
            />
          )}
          <Sign tone={tone} size={r} />
        </Link>
        {/* Hidden from screen readers, because the link's name says it in full. */}
        {spacing >= SPACING_FOR_NAMES && (
          <g aria-hidden className={classes.beside} data-large={isLarge}>
            <text className={classes.name} y={r + (isLarge ? 21 : 19)}>
              {cut(machine.name, letters)}
            </text>
            {spacing >= SPACING_FOR_WORK && (
              <text className={classes.caption} y={r + (isLarge ? 38 : 33)}>
                {busy === undefined ? cut(workWords(t, machine), letters + 1) : `${cut(workWords(t, machine), letters - 4)} ${shareText(busy)}`}
              </text>
            )}
          </g>
        )}
      </g>
    </g>
  );
});

export function Sign({ tone, size }: { tone: Tone; size: number }) {
  const s = size * 0.42;
  const paths: Record<Tone, string | null> = {
    working: `M${-s * 0.7} ${-s}L${s} 0L${-s * 0.7} ${s}Z`,
    free: null,
    arriving: `M${-s} 0H${s}M0 ${-s}V${s}`,
    leaving: `M${-s} 0H${s}M${s * 0.2} ${-s * 0.8}L${s} 0L${s * 0.2} ${s * 0.8}`,
    lost: `M${-s} ${-s}L${s} ${s}M${-s} ${s}L${s} ${-s}`,
    left: `M${-s} 0H${s}`,
  };
  const path = paths[tone];
  return path === null ? null : <path className={classes.sign} d={path} data-filled={tone === "working"} />;
}

function cut(text: string, most: number): string {
  return text.length <= most ? text : `${text.slice(0, Math.max(1, most - 1))}…`;
}
