import { createTheme, Switch, type CSSVariablesResolver, type MantineColorsTuple } from "@mantine/core";

/** Slate blue-green; shade 7 on white and shade 4 on dark both pass WCAG AA for small text. */
const lagoon: MantineColorsTuple = [
  "#e6f7f8", "#d2ebed", "#a6d6da", "#75c0c7", "#4fadb6", "#36a1ab", "#1f929d", "#0b7285", "#076374", "#005261",
];

/** Mantine's dark greys, tinted to match. */
const dark: MantineColorsTuple = [
  "#c6d0d8", "#aab6c0", "#7d8a95", "#64717c", "#3d4853", "#323c46", "#252d35", "#1b2127", "#171d23", "#12171b",
];

export const theme = createTheme({
  colors: { lagoon, dark },
  primaryColor: "lagoon",
  primaryShade: { light: 7, dark: 7 },
  autoContrast: true,
  defaultRadius: "md",
  fontFamily: 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif',
  fontFamilyMonospace: 'ui-monospace, "SF Mono", "Cascadia Code", "DejaVu Sans Mono", monospace',
  headings: { fontWeight: "600", sizes: { h1: { fontSize: "1.5rem" }, h2: { fontSize: "1.05rem" } } },
  respectReducedMotion: true,
  components: { Switch: Switch.extend({ defaultProps: { withThumbIndicator: false } }) },
});

/** Mantine's own dimmed text is too pale for WCAG AA. */
export const variables: CSSVariablesResolver = () => ({
  variables: {},
  light: {
    "--mantine-color-dimmed": "#5b6570",
    "--mantine-color-body": "#fafbfc",
    "--mantine-color-error": "#c92a2a",
    "--sc-surface": "#ffffff",
    "--sc-line": "#dfe4e8",
    "--sc-ink": "#1b242c",
  },
  dark: {
    "--mantine-color-dimmed": "#9ba6b1",
    "--mantine-color-body": "#14191e",
    "--mantine-color-error": "#ff8787",
    "--sc-surface": "#1b2127",
    "--sc-line": "#323b44",
    "--sc-ink": "#dfe5ea",
  },
});
