/** Parallel coordinates: one line for each job, from axis to axis. A table of the page has the same values. */
import { Text } from "@mantine/core";
import type { CSSProperties, KeyboardEvent } from "react";

import { laidOut, type Axis } from "./coordinates";
import classes from "./ParallelCoordinates.module.css";
import { useWidth } from "./useWidth";

export interface CoordinateLine {
  id: string;
  /** One value for each axis. */
  values: readonly unknown[];
  /** Name and values, for the line below the picture. */
  words: string;
  colour?: string;
  look?: "best" | "stopped" | "open";
}

interface Props {
  axes: readonly Axis[];
  /** Names of the axes. */
  names: readonly string[];
  /** The first line is drawn on top. */
  lines: readonly CoordinateLine[];
  height: number;
  /** Names of the group and of the picture. */
  label: string;
  description: string;
  /** Shown while no line stands out. */
  hint: string;
  /** Place of the line that stands out. */
  lit: number | null;
  onLight: (place: number | null) => void;
}

export function ParallelCoordinates({ axes, names, lines, height, label, description, hint, lit, onLight }: Props) {
  const { ref, width: space } = useWidth<HTMLDivElement>();
  const { width, x, top, bottom, names: nameAt, paths } = laidOut(axes, lines.map(({ values }) => values), space, height);
  const drawn = lines.map((line, place) => ({ ...line, place })).reverse();
  const onKeyDown = (event: KeyboardEvent) => {
    const move = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (move === 0 || lines.length === 0) return;
    event.preventDefault();
    onLight(lit === null ? 0 : (lit + move + lines.length) % lines.length);
  };
  return (
    <>
      <div ref={ref} className="scroll" tabIndex={0} role="group" aria-label={label} onKeyDown={onKeyDown} onBlur={() => onLight(null)}>
        {space > 0 && (
          <svg width={width} height={height} role="img" aria-label={description} className={classes.picture} onPointerLeave={() => onLight(null)}>
            {drawn.map(({ id, colour, look, place }) => (
              <g key={id} onPointerEnter={() => onLight(place)} style={{ "--run": colour } as CSSProperties}>
                <path d={paths[place]} className={classes.line} data-look={look} data-lit={lit === null ? undefined : lit === place} />
                <path d={paths[place]} className={classes.target} />
              </g>
            ))}
            {axes.map((axis, place) => {
              const isLast = place > 0 && place === axes.length - 1;
              const name = nameAt[place]!;
              return (
                <g key={place}>
                  <line x1={x[place]} x2={x[place]} y1={top} y2={bottom} className={classes.axis} />
                  <text x={name.x} y={name.y} textAnchor={name.anchor} className={classes.name}>
                    {names[place]}
                  </text>
                  {axis.ticks.map(({ at, text }) => (
                    <text
                      key={text}
                      x={x[place]! + (isLast ? -6 : 6)}
                      y={bottom - at * (bottom - top)}
                      textAnchor={isLast ? "end" : "start"}
                      dominantBaseline="central"
                      className={classes.tick}
                    >
                      {text.length > 12 ? `${text.slice(0, 11)}…` : text}
                    </text>
                  ))}
                </g>
              );
            })}
          </svg>
        )}
      </div>
      <Text size="sm" c="dimmed" className={classes.words!} role="status">
        {lit === null ? hint : lines[lit]?.words}
      </Text>
    </>
  );
}
