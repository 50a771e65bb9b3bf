/** Curves over steps, drawn by uPlot: drag to zoom, double-click to zoom out. The parent component holds the zoom. */
import { useComputedColorScheme } from "@mantine/core";
import { useMergedRef } from "@mantine/hooks";
import { useEffect, useRef } from "react";
import { useTranslation } from "react-i18next";
import uPlot, { type AlignedData } from "uplot";
import "uplot/dist/uPlot.min.css";

import { DASHES, INK } from "./ink";
import { useWidth } from "./useWidth";
import classes from "./CurveChart.module.css";

const HEIGHT = 280;

/** Distances between ticks are whole steps. */
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));

export interface Curve {
  label: string;
  /** One value for each step; null if there is none. */
  values: (number | null)[];
  /** Index of its colour and dash pattern. */
  ink: number;
  /** Whether the curve has few values, so that its points are drawn. */
  isSparse?: boolean;
  /** Whether the curve is drawn faintly, behind a smoothed curve of the same colour. */
  isFaint?: boolean;
  /** Colour that replaces the colour of its ink; then only `isDashed` decides about dashes. */
  colour?: string;
  isDashed?: boolean;
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
  height?: number;
  /** Lowest and highest value of the vertical axis; default: the range of the curves. */
  range?: readonly [low: number, high: number] | undefined;
  /** Inks of the highlighted curves; undefined for all. */
  lit?: ReadonlySet<number> | undefined;
  /**
   * Called with the index of the step under the pointer, and with null when the pointer leaves. With this callback, the
   * chart has no legend.
   */
  onPoint?: (index: number | null) => void;
}

export function CurveChart({ steps, curves, isLog, zoom, onZoom, description, format, height = HEIGHT, range, lit, onPoint }: Props) {
  const scheme = useComputedColorScheme("light");
  const { t } = useTranslation();
  const { ref: measured, width } = useWidth<HTMLDivElement>();
  const frame = useRef<HTMLDivElement>(null);
  const ref = useMergedRef(frame, measured);
  const plot = useRef<uPlot | null>(null);
  const shape = curves.map((curve) => [curve.label, curve.ink, curve.isSparse, curve.isFaint, curve.colour].join("\t")).join("\n");
  const data: AlignedData = [steps, ...curves.map((curve) => curve.values)];
  // Read by the chart's callbacks, so that new values do not require a new chart.
  const latest = useRef({ data, zoom, onZoom, format, range, lit, onPoint });
  latest.current = { data, zoom, onZoom, format, range, lit, onPoint };
  const hasWidth = width > 0;

  useEffect(() => {
    const holder = frame.current;
    if (holder === null || !hasWidth) return;
    const drawn = new uPlot(
      {
        width,
        height,
        legend: { show: onPoint === undefined },
        cursor: {
          drag: { x: true, y: false, setScale: false },
          bind: { dblclick: () => () => (latest.current.onZoom(null), null) },
        },
        scales: {
          x: { time: false, range: (_, min, max) => (latest.current.zoom as [number, number] | null) ?? [min, max] },
          y: {
            distr: isLog ? 3 : 1,
            ...(!isLog && { range: (_, min, max) => rangeOf(latest.current.range, min, max) }),
          },
        },
        axes: axesOf(scheme, (value) => latest.current.format(value)),
        series: [
          { label: t("step"), value: (self, value, _, index) => (index === null ? self.data[0].at(-1) : value) ?? "–" },
          ...curves.map((curve) => ({ ...seriesOf(curve, scheme, (value) => latest.current.format(value)), alpha: alphaOf(curve, latest.current.lit) })),
        ],
        hooks: {
          setCursor: [(self) => latest.current.onPoint?.(self.cursor.idx ?? null)],
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
    // setData below passes new values to the chart; only a change of its shape creates a new chart.
  }, [scheme, isLog, shape, hasWidth]);

  useEffect(() => {
    if (hasWidth) plot.current?.setSize({ width, height });
  }, [width, height, hasWidth]);

  useEffect(() => {
    plot.current?.setData(latest.current.data);
  }, [steps, curves, zoom?.[0], zoom?.[1], range?.[0], range?.[1]]);

  useEffect(() => {
    const drawn = plot.current;
    // A chart that has not drawn its first paths yet cannot redraw them.
    if (drawn === null || drawn.status === 0) return;
    curves.forEach((curve, place) => (drawn.series[place + 1]!.alpha = alphaOf(curve, lit)));
    drawn.redraw();
  }, [lit]);

  return <div ref={ref} className={classes.chart} role="img" aria-label={description} />;
}

function alphaOf({ ink }: Curve, lit: ReadonlySet<number> | undefined): number {
  return lit === undefined || lit.has(ink) ? 1 : 0.15;
}

/** The given range, or the range of the values with uPlot's own padding; uPlot gives null for no values. */
function rangeOf(given: readonly [number, number] | undefined, min: number | null, max: number | null): uPlot.Range.MinMax {
  if (given !== undefined) return [...given];
  return min === null || max === null ? [null, null] : uPlot.rangeNum(min, max, 0.1, true);
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
  const hue = curve.colour ?? palette[curve.ink % palette.length]!;
  const dash = curve.colour === undefined ? DASHES[curve.ink % DASHES.length]! : curve.isDashed ? [6, 4] : [];
  return {
    label: curve.label,
    stroke: curve.isFaint ? `${hue}55` : hue,
    width: curve.isFaint ? 1 : 2,
    dash,
    spanGaps: true,
    value: (self, value, place, index) => {
      // While the pointer is elsewhere, the legend shows the last values.
      const shown = index === null ? Array.from(self.data[place]!).findLast((one) => one != null) : value;
      return shown == null ? "–" : format(shown);
    },
    points: { show: curve.isSparse ?? false, size: 7 },
  };
}
