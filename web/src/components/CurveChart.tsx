/** Curves over steps, drawn by uPlot: drag to zoom, double-click to zoom out. */
import { useComputedColorScheme } from "@mantine/core";
import { useElementSize, useMergedRef } from "@mantine/hooks";
import { useEffect, useRef } from "react";
import uPlot, { type AlignedData } from "uplot";
import "uplot/dist/uPlot.min.css";

import classes from "./CurveChart.module.css";

const HEIGHT = 260;

/** uPlot draws on a canvas, which knows no CSS variables. */
const INK = {
  light: { axis: "#4a5561", grid: "#e6eaee", curves: ["#0b7285", "#a34a00", "#5f3dc4"] },
  dark: { axis: "#aab4be", grid: "#2b333b", curves: ["#4fc1cf", "#ffa94d", "#b197fc"] },
};

export interface Curve {
  label: string;
  /** One value for each step, null where there is none. */
  values: (number | null)[];
  /** Few and far between: draw its points. */
  isSparse?: boolean;
}

interface Props {
  steps: number[];
  curves: Curve[];
  isLog: boolean;
  /** The picture in words. */
  description: string;
  format: (value: number) => string;
}

export function CurveChart({ steps, curves, isLog, description, format }: Props) {
  const scheme = useComputedColorScheme("light");
  const { ref: measured, width } = useElementSize<HTMLDivElement>();
  const frame = useRef<HTMLDivElement>(null);
  const ref = useMergedRef(frame, measured);
  const plot = useRef<uPlot | null>(null);
  const labels = curves.map((curve) => curve.label).join("\n");
  const data: AlignedData = [steps, ...curves.map((curve) => curve.values)];
  const latest = useRef(data);
  latest.current = data;
  const hasWidth = width > 0;

  useEffect(() => {
    const holder = frame.current;
    if (holder === null || !hasWidth) return;
    const ink = INK[scheme];
    const axis = { stroke: ink.axis, grid: { stroke: ink.grid, width: 1 }, ticks: { stroke: ink.grid, width: 1 } };
    const drawn = new uPlot(
      {
        width: holder.clientWidth,
        height: HEIGHT,
        scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } },
        axes: [axis, { ...axis, size: 56 }],
        series: [
          { label: "step", value: (_, value) => value ?? "–" },
          ...labels.split("\n").map((label, index) => ({
            label,
            stroke: ink.curves[index % ink.curves.length]!,
            width: 2,
            spanGaps: true,
            value: (_: uPlot, value: number | null) => (value === null ? "–" : format(value)),
            points: { show: curves[index]?.isSparse ?? false, size: 7 },
          })),
        ],
      },
      latest.current,
      holder,
    );
    plot.current = drawn;
    return () => {
      plot.current = null;
      drawn.destroy();
    };
    // New values reach the chart by setData below; only what changes its shape makes a new one.
  }, [scheme, isLog, labels, hasWidth]);

  useEffect(() => {
    if (hasWidth) plot.current?.setSize({ width, height: HEIGHT });
  }, [width, hasWidth]);

  useEffect(() => {
    const drawn = plot.current;
    if (drawn === null) return;
    // Somebody who zoomed in keeps the view while values arrive.
    const { min, max } = drawn.scales.x ?? {};
    const old = drawn.data[0];
    const isZoomed = min != null && max != null && (min > (old[0] ?? min) || max < (old.at(-1) ?? max));
    drawn.setData(latest.current, !isZoomed);
    if (isZoomed) drawn.redraw();
  }, [steps, curves]);

  return <div ref={ref} className={classes.chart} role="img" aria-label={description} />;
}
