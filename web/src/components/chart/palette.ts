/** Colours of up to 20 runs: neighbours differ in hue and lightness, and each has a contrast of 3 : 1 with its background. */
export const RUN_COLOURS = {
  light: [
    "#0b7285", "#c2410c", "#5f3dc4", "#2b7a3e", "#a61e4d", "#1c5fb0", "#7a6a00", "#b5179e", "#7b4b2a", "#495866",
    "#0284c7", "#4d7c0f", "#dc2626", "#312e81", "#b45309", "#e0457b", "#0d8a66", "#86198f", "#5b7fa6", "#1b242c",
  ],
  dark: [
    "#4fc1cf", "#ff9d5c", "#b197fc", "#69db7c", "#f783ac", "#74a9ff", "#e0d04f", "#f06be0", "#c79a78", "#a9b6c2",
    "#38bdf8", "#a3e635", "#ff6b6b", "#8b8cf0", "#fbbf24", "#ffa8c5", "#2dd4a7", "#d08bea", "#8fb3da", "#e9eef2",
  ],
} as const;
