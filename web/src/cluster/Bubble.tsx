/** An island of many machines as a circle: their number, speed and load; a click opens it. */
import { Link } from "@tanstack/react-router";
import { memo } from "react";
import { useTranslation } from "react-i18next";

import { count, si } from "../format";
import { sumsOf, type MachineGroup } from "./groups";
import { qualityOf } from "./layout";
import classes from "./ClusterMap.module.css";
import { clusterSearch } from "./search";
import { groupTitle } from "./words";

interface Props {
  group: MachineGroup;
  x: number;
  y: number;
  /** Radius of the island, in pixels. */
  radius: number;
  number: number;
}

export const Bubble = memo(function Bubble({ group, x, y, radius, number }: Props) {
  const { t } = useTranslation();
  const sums = sumsOf(group.machines);
  const share = sums.machines > 0 ? sums.atWork / sums.machines : 0;
  const r = radius - 5;
  const around = 2 * Math.PI * r;
  const title = groupTitle(t, group, number);
  const machines = t("{{count}} machines", { count: sums.machines });
  const atWork = t("{{number}} at work", { number: count(sums.atWork) });
  const speed = sums.flopsPerS > 0 ? si(sums.flopsPerS, "FLOP/s") : "–";
  return (
    <g style={{ transform: `translate(${x}px, ${y}px)` }} className={classes.mover}>
      <Link
        to="/"
        search={(old) => clusterSearch({ ...old, island: group.id })}
        className={classes.bubble}
        aria-label={`${title}: ${machines}, ${atWork}, ${speed}`}
      >
        <circle className={classes.shore} r={radius} data-kind={group.kind} data-quality={qualityOf(group.island?.bytes_per_s)} />
        <circle
          className={classes.share}
          r={r}
          strokeDasharray={`${around} ${around}`}
          strokeDashoffset={around * (1 - share)}
          transform="rotate(-90)"
        />
      </Link>
      {/* Hidden from screen readers, because the link's name says the same. */}
      <g aria-hidden className={classes.beside}>
        <text className={classes.title} y={-18}>
          {title}
        </text>
        <text className={classes.caption} y={0}>
          {machines}
        </text>
        <text className={classes.caption} y={17}>
          {atWork}
        </text>
        <text className={classes.caption} y={34}>
          {speed}
        </text>
      </g>
    </g>
  );
});
