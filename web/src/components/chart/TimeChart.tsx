/** A small chart of values over time, drawn by uPlot. Charts with the same `sync` show the same moment under the pointer. */
import { useComputedColorScheme } from "@mantine/core";
import { useMergedRef } from "@mantine/hooks";
import { useEffect, useRef } from "react";
import uPlot, { type AlignedData } from "uplot";
import "uplot/dist/uPlot.min.css";

import { DASHES, INK } from "./ink";
import { useWidth } from "./useWidth";

/** Distances between ticks of bytes. */
const POWERS_OF_TWO = Array.from({ length: 50 }, (_, power) => 2 ** power);
/** Distances between ticks of the time axis, in seconds. */
const TIMES = [5, 10, 15, 30, 60, 120, 240, 360, 1440, 2880].map((minutes) => minutes * 60);

export interface TimeSeries {
  /** One value for each moment; null where nothing was measured. */
  values: readonly (number | null)[];
  /** Index of its colour and dash pattern. */
  ink: number;
}

interface Props {
  /** Moments in seconds since 1970, ascending. */
  times: readonly number[];
  series: readonly TimeSeries[];
  /** Ends of the time axis, in seconds since 1970. */
  begin: number;
  end: number;
  /** Highest value of the vertical axis, which begins at 0; null for the maximum of the values. */
  top: number | null;
  height: number;
  /** Text alternative of the picture. */
  description: string;
  /** Texts of the axes; a chart without them has no axes. */
  axes?: { value: (value: number) => string; time: (moment: number) => string; isBinary?: boolean };
  sync?: string;
  /** Times that are shaded, in seconds since 1970. */
  bands?: readonly (readonly [from: number, to: number])[];
  hasPoints?: boolean;
  /** Called with the index of the moment under the pointer, and with null when the pointer leaves. */
  onPoint?: (index: number | null) => void;
}

/** Half the width of a time's label. */
const HALF_TIME_PX = 16;

export function TimeChart(props: Props) {
  const { times, series, begin, end, top, height, description, axes, sync, bands, hasPoints = false } = props;
  const scheme = useComputedColorScheme("light");
  const { ref: measured, width } = useWidth<HTMLDivElement>();
  const frame = useRef<HTMLDivElement>(null);
  const ref = useMergedRef(frame, measured);
  const plot = useRef<uPlot | null>(null);
  // Read by the chart's callbacks, so that new values do not require a new chart.
  const latest = useRef(props);
  latest.current = props;
  const data = [times, ...series.map(({ values }) => values)] as unknown as AlignedData;
  const inks = series.map(({ ink }) => ink).join();
  const hasWidth = width > 0;

  useEffect(() => {
    const holder = frame.current;
    if (holder === null || !hasWidth) return;
    const ink = INK[scheme];
    const drawn = new uPlot(
      {
        width,
        height,
        legend: { show: false },
        padding: axes === undefined ? [2, 0, 2, 0] : [8, 8, 0, 0],
        cursor: {
          y: false,
          drag: { x: false, y: false },
          points: { size: 6 },
          ...(sync !== undefined && { sync: { key: sync, setSeries: false, scales: ["x", null] } }),
        },
        scales: {
          x: { time: false, range: () => [latest.current.begin, latest.current.end] },
          y: { range: (_, __, max) => [0, latest.current.top ?? Math.max(1, (max ?? 0) * 1.1)] },
        },
        axes: axes === undefined ? [{ show: false }, { show: false }] : axesOf(scheme, latest),
        series: [
          {},
          ...inks.split(",").map((each) => ({
            stroke: ink.curves[Number(each) % ink.curves.length]!,
            dash: DASHES[Number(each) % DASHES.length]!,
            width: 1.5,
            spanGaps: false,
            points: { show: hasPoints, size: 5 },
          })),
        ],
        hooks: {
          drawClear: [(self) => shade(self, latest.current.bands ?? [], ink.band)],
          setCursor: [(self) => latest.current.onPoint?.(self.cursor.idx ?? null)],
        },
      },
      data,
      holder,
    );
    plot.current = drawn;
    return () => {
      plot.current = null;
      drawn.destroy();
    };
    // New values reach the chart by setData below; only a change of its shape creates a new chart.
  }, [scheme, inks, axes === undefined, sync, hasPoints, hasWidth]);

  useEffect(() => {
    if (hasWidth) plot.current?.setSize({ width, height });
  }, [width, height, hasWidth]);

  useEffect(() => {
    plot.current?.setData(data);
  }, [times, series, begin, end, top, bands]);

  return <div ref={ref} style={{ minHeight: height, minWidth: 0, overflow: "hidden" }} role="img" aria-label={description} />;
}

function axesOf(scheme: "light" | "dark", latest: { readonly current: Props }): uPlot.Axis[] {
  const ink = INK[scheme];
  const axis = { stroke: ink.axis, font: "11px system-ui, sans-serif", grid: { stroke: ink.grid, width: 1 }, ticks: { show: false } };
  return [
    { ...axis, incrs: TIMES, space: 60, size: 22, gap: 4, values: (plot, ticks) => ticks.map((tick) => (isBesideLabels(plot, tick) ? null : latest.current.axes!.time(tick * 1000))) },
    { ...axis, ...(latest.current.axes!.isBinary && { incrs: POWERS_OF_TWO }), space: 28, size: 62, gap: 4, values: (_, ticks) => ticks.map((tick) => latest.current.axes!.value(tick)) },
  ];
}

/** Whether the label of a moment would overlap the labels of the other axis. */
function isBesideLabels(plot: uPlot, moment: number): boolean {
  return plot.valToPos(moment, "x") < HALF_TIME_PX;
}

function shade(plot: uPlot, bands: readonly (readonly [number, number])[], colour: string): void {
  const { ctx, bbox } = plot;
  const right = bbox.left + bbox.width;
  ctx.fillStyle = colour;
  for (const [from, to] of bands) {
    const left = Math.max(bbox.left, plot.valToPos(from, "x", true));
    const width = Math.min(right, plot.valToPos(to, "x", true)) - left;
    if (width > 0) ctx.fillRect(left, bbox.top, width, bbox.height);
  }
}
