/** Layout of parallel coordinates: places of the axes and paths of the lines, in pixels. */
const NAME_PX = 16;
/** Space between two axes below which their names are placed in two rows. */
const NARROW_PX = 130;
/** Smallest space between two axes: enough for a value beside its axis. */
const LEAST_GAP_PX = 76;
/** Space beside the outer axes, for their names: on wide pictures, and on those of a phone, where four axes should fit. */
const SIDE_PX = 70;
const LEAST_SIDE_PX = 44;
const BOTTOM_PX = 12;

export interface Axis {
  name: string;
  /** Marks of the axis: heights from 0 (bottom) to 1 (top), with their texts. */
  ticks: { at: number; text: string }[];
  /** Height of a value, from 0 to 1; undefined if the axis does not have it. */
  at: (value: unknown) => number | undefined;
}

interface Layout {
  /** Width of the picture: wider than the available space if the axes would otherwise be too close. */
  width: number;
  /** Horizontal place of each axis. */
  x: number[];
  /** Vertical places of the upper and the lower end of all axes. */
  top: number;
  bottom: number;
  /** Place of the name of each axis, and what is there: its middle, or its start or end where a long one must not be cut. */
  names: { x: number; y: number; anchor: "start" | "middle" | "end" }[];
  /** One path for each line; it skips axes on which the line has no value. */
  paths: string[];
}

/**
 * @param lines Values of each line, one for each axis.
 * @param space Width of the space for the picture.
 */
export function laidOut(axes: readonly Axis[], lines: readonly (readonly unknown[])[], space: number, height: number): Layout {
  const gaps = Math.max(1, axes.length - 1);
  const side = Math.min(SIDE_PX, Math.max(LEAST_SIDE_PX, (space - gaps * LEAST_GAP_PX) / 2));
  const width = Math.max(space, 2 * side + gaps * LEAST_GAP_PX);
  const gap = (width - 2 * side) / gaps;
  const x = axes.map((_, place) => side + place * gap);
  const rows = gap < NARROW_PX ? 2 : 1;
  const [top, bottom] = [(rows + 1) * NAME_PX, height - BOTTOM_PX];
  const paths = lines.map((values) => {
    const points = axes.flatMap((axis, place) => {
      const at = axis.at(values[place]);
      return at === undefined ? [] : [`${x[place]!.toFixed(1)} ${(bottom - at * (bottom - top)).toFixed(1)}`];
    });
    return points.length === 0 ? "" : `M${points.join("L")}`;
  });
  const names = x.map((middle, place) => {
    const y = ((place % rows) + 1) * NAME_PX - 4;
    if (side === SIDE_PX) return { x: middle, y, anchor: "middle" as const };
    if (place === 0) return { x: 0, y, anchor: "start" as const };
    return place === gaps ? { x: width, y, anchor: "end" as const } : { x: middle, y, anchor: "middle" as const };
  });
  return { width, x, top, bottom, names, paths };
}
