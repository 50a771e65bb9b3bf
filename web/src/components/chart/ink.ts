/** Colours and dashes of curves. uPlot draws on a canvas, which knows no CSS variables. */
export const INK = {
  light: {
    axis: "#4a5561",
    grid: "#e6eaee",
    band: "#0b728522",
    curves: ["#0b7285", "#a34a00", "#5f3dc4", "#2b7a3e", "#a61e4d", "#1c5fb0"],
  },
  dark: {
    axis: "#aab4be",
    grid: "#2b333b",
    band: "#4fc1cf2a",
    curves: ["#4fc1cf", "#ffa94d", "#b197fc", "#8ce99a", "#faa2c1", "#74c0fc"],
  },
} as const;

/** Each hue has its own dash pattern, for colour-blind users. */
export const DASHES = [[], [8, 4], [2, 3], [12, 4, 2, 4], [5, 2], [1, 4]];
