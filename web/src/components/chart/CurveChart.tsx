/** Curves over steps, drawn by uPlot: drag to zoom, double-click to zoom out. The parent component holds the zoom. */
import { useComputedColorScheme } from "@mantine/core";
import { useMergedRef } from "@mantine/hooks";
import { useEffect, useRef } from "react";
import { useTranslation } from "react-i18next";
import uPlot, { type AlignedData } from "uplot";
import "uplot/dist/uPlot.min.css";

import { useWidth } from "./useWidth";
import classes from "./CurveChart.module.css";

const HEIGHT = 280;

/** uPlot draws on a canvas, which knows no CSS variables. */
const INK = {
  light: {
    axis: "#4a5561",
    grid: "#e6eaee",
    curves: ["#0b7285", "#a34a00", "#5f3dc4", "#2b7a3e", "#a61e4d", "#1c5fb0"],
  },
  dark: {
    axis: "#aab4be",
    grid: "#2b333b",
    curves: ["#4fc1cf", "#ffa94d", "#b197fc", "#8ce99a", "#faa2c1", "#74c0fc"],
  },
};
/** Distances between ticks are whole steps. */
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
/** Each hue has its own dash pattern, for colour-blind users. */
const DASHES = [[], [8, 4], [2, 3], [12, 4, 2, 4], [5, 2], [1, 4]];

export interface Curve {
  label: string;
  /** One value for each step; null if there is none. */
  values: (number | null)[];
  /** Index of its colour and dash pattern. */
  ink: number;
  /** Whether it has few values, so that its points are drawn. */
  isSparse?: boolean;
  /** Whether it is drawn faintly, behind a smoothed curve of the same colour. */
  isFaint?: boolean;
}

export type Zoom = readonly [first: number, last: number];

interface Props {
  steps: number[];
  curves: Curve[];
  isLog: boolean;
  /** First and last step shown; null for all. */
  zoom: Zoom | null;
  onZoom: (zoom: Zoom | null) => void;
  /** Text alternative of the picture. */
  description: string;
  format: (value: number) => string;
}

export function CurveChart({ steps, curves, isLog, zoom, onZoom, description, format }: Props) {
  const scheme = useComputedColorScheme("light");
  const { t } = useTranslation();
  const { ref: measured, width } = useWidth<HTMLDivElement>();
  const frame = useRef<HTMLDivElement>(null);
  const ref = useMergedRef(frame, measured);
  const plot = useRef<uPlot | null>(null);
  const shape = curves.map((curve) => [curve.label, curve.ink, curve.isSparse, curve.isFaint].join("\t")).join("\n");
  const data: AlignedData = [steps, ...curves.map((curve) => curve.values)];
  // Read by the chart's callbacks, so that new values do not require a new chart.
  const latest = useRef({ data, zoom, onZoom, format });
  latest.current = { data, zoom, onZoom, format };
  const hasWidth = width > 0;

  useEffect(() => {
    const holder = frame.current;
    if (holder === null || !hasWidth) return;
    const drawn = new uPlot(
      {
        width,
        height: HEIGHT,
        cursor: {
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => (latest.current.onZoom(null), null) },
        },
        scales: {
          x: { time: false, range: (_, min, max) => (latest.current.zoom as [number, number] | null) ?? [min, max] },
          y: { distr: isLog ? 3 : 1 },
        },
        axes: axesOf(scheme, (value) => latest.current.format(value)),
        series: [
          { label: t("step"), value: (_, value) => value ?? "–" },
          ...curves.map((curve) => seriesOf(curve, scheme, (value) => latest.current.format(value))),
        ],
        hooks: {
          setSelect: [
            (self) => {
              const { left, width: wide } = self.select;
              if (wide < 4) return;
              const first = Math.round(self.posToVal(left, "x"));
              const last = Math.round(self.posToVal(left + wide, "x"));
              self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              if (first < last) latest.current.onZoom([Math.max(0, first), last]);
            },
          ],
        },
      },
      latest.current.data,
      holder,
    );
    plot.current = drawn;
    return () => {
      plot.current = null;
      drawn.destroy();
    };
    // New values reach the chart by setData below; only a change of its shape creates a new chart.
  }, [scheme, isLog, shape, hasWidth]);

  useEffect(() => {
    if (hasWidth) plot.current?.setSize({ width, height: HEIGHT });
  }, [width, hasWidth]);

  useEffect(() => {
    plot.current?.setData(latest.current.data);
  }, [steps, curves, zoom?.[0], zoom?.[1]]);

  return <div ref={ref} className={classes.chart} role="img" aria-label={description} />;
}

function axesOf(scheme: "light" | "dark", format: (value: number) => string): uPlot.Axis[] {
  const ink = INK[scheme];
  const axis = { stroke: ink.axis, grid: { stroke: ink.grid, width: 1 }, ticks: { stroke: ink.grid, width: 1 } };
  // A logarithmic axis leaves out labels that would be too close.
  const values = (_: uPlot, ticks: (number | null)[]) => ticks.map((tick) => (tick === null ? "" : format(tick)));
  return [{ ...axis, incrs: WHOLE }, { ...axis, size: 68, values }];
}

function seriesOf(curve: Curve, scheme: "light" | "dark", format: (value: number) => string): uPlot.Series {
  const palette = INK[scheme].curves;
  const hue = palette[curve.ink % palette.length]!;
  return {
    label: curve.label,
    stroke: curve.isFaint ? `${hue}55` : hue,
    width: curve.isFaint ? 1 : 2,
    dash: DASHES[curve.ink % DASHES.length]!,
    spanGaps: true,
    value: (_: uPlot, value: number | null) => (value === null ? "–" : format(value)),
    points: { show: curve.isSparse ?? false, size: 7 },
  };
}
