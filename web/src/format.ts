/** Formats numbers and times in the current language. All figures are in SI units and of tabular width. */
import i18next from "i18next";

import { locale } from "./i18n";

/** Translate like `useTranslation`; in tests without i18next it returns the English text. */
export function t(words: string, filled: Record<string, string | number> = {}): string {
  if (i18next.isInitialized) return i18next.t(words, filled);
  return words.replace(/\{\{(\w+)\}\}/g, (_, name: string) => String(filled[name]));
}

const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] as const;

export function bytes(value: number): string {
  let unit = 0;
  while (value >= 1024 && unit < BYTE_UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toPrecision(value >= 10 ? 3 : 2)} ${BYTE_UNITS[unit]}`;
}

const SI_UNITS = ["", "k", "M", "G", "T", "P"] as const;

/** 51_000_000_000, "FLOP/s" -> "51.0 GFLOP/s" */
export function si(value: number, unit: string): string {
  let step = 0;
  while (value >= 1000 && step < SI_UNITS.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${step === 0 && Number.isInteger(value) ? value : value.toPrecision(3)} ${SI_UNITS[step]}${unit}`.trim();
}

export function count(value: number): string {
  // The browser loads its number formats on first use, which would slow down the first page.
  return Number.isInteger(value) && Math.abs(value) < 1000 ? String(value) : value.toLocaleString(locale());
}

/** Seconds in the two largest units: "1 h 4 min", "12 s", "0.35 s". */
export function duration(seconds: number): string {
  return largestUnits(seconds).join(" ");
}

function largestUnits(seconds: number): string[] {
  if (seconds < 1) return [inSeconds(seconds.toPrecision(2))];
  const whole = Math.round(seconds);
  if (whole < 60) return [inSeconds(whole)];
  if (whole < 3600) return [inMinutes(Math.floor(whole / 60)), inSeconds(whole % 60)];
  if (whole < 86_400) return [inHours(Math.floor(whole / 3600)), inMinutes(Math.floor((whole % 3600) / 60))];
  return [t("{{number}} d", { number: Math.floor(whole / 86_400) }), inHours(Math.floor((whole % 86_400) / 3600))];
}

const inSeconds = (number: number | string) => t("{{number}} s", { number });
const inMinutes = (number: number | string) => t("{{number}} min", { number });
const inHours = (number: number | string) => t("{{number}} h", { number });
const inDays = (number: number | string) => t("{{number}} days", { number });
const inYears = (number: number | string) => t("{{number}} years", { number });

/** Units of long times in seconds; each is used from two units on. */
const LONG = [
  [365.25 * 86_400, inYears],
  [86_400, inDays],
  [3600, inHours],
  [60, inMinutes],
] as const;

/** The time of one step, in the format of `share_compute.quantities.seconds_text`: "12.4 ms", "1.31 s", "3.2 min". */
export function stepTime(seconds: number): string {
  for (const [unitSeconds, inUnits] of LONG) {
    if (seconds >= 2 * unitSeconds) return inUnits(oneDecimal(seconds / unitSeconds));
  }
  // Compared after rounding, so that 0.99996 s does not become "1000.0 ms".
  if (Math.round(seconds * 1e4) >= 1e4) return inSeconds(seconds.toFixed(2));
  if (Math.round(seconds * 1e6) >= 1e3) return `${oneDecimal(seconds * 1e3)} ms`;
  return `${Math.round(seconds * 1e6)} us`;
}

function oneDecimal(value: number): string {
  return value.toLocaleString(locale(), { minimumFractionDigits: 1, maximumFractionDigits: 1 });
}

/** Relative difference of two times: "+25%". */
export function difference(measured: number, predicted: number): string {
  const share = Math.round((measured / predicted - 1) * 100);
  return `${share < 0 ? "−" : "+"}${Math.abs(share)}%`;
}

/** The time since a moment: "just now", "12 s ago". */
export function ago(moment: string, now: number): string {
  const seconds = (now - Date.parse(moment)) / 1000;
  return seconds < 2 ? t("just now") : t("{{time}} ago", { time: largestUnits(seconds)[0]! });
}

/** At most three figures, always in ms, so that links can be compared down a column. */
export function latency(seconds: number): string {
  const milliseconds = seconds * 1e3;
  return `${milliseconds < 10 ? milliseconds.toFixed(2) : Math.round(milliseconds)} ms`;
}

/** Locale of dates and times; for English that of Britain: day first, 24 hours. */
function place(): string {
  return locale() === "en" ? "en-GB" : locale();
}

export function clock(moment: string): string {
  return new Date(moment).toLocaleTimeString(place());
}

/** As `dateAndTime`, with seconds. */
export function dateAndClock(moment: string): string {
  return new Date(moment).toLocaleString(place(), { dateStyle: "medium", timeStyle: "medium" });
}

/** "22 Nov", for axes. */
export function dayOfMonth(moment: number): string {
  return new Date(moment).toLocaleDateString(place(), { day: "numeric", month: "short" });
}

/** "18:05", for axes. */
export function hourAndMinute(moment: number): string {
  return new Date(moment).toLocaleTimeString(place(), { hour: "2-digit", minute: "2-digit" });
}

export function dateAndTime(moment: string): string {
  return new Date(moment).toLocaleString(place(), { dateStyle: "medium", timeStyle: "short" });
}

export function loss(value: number): string {
  return significant(value, 4);
}

/** A number with these significant digits; or with all digits of its whole part if there are more. */
export function significant(value: number, digits: number): string {
  const size = Math.abs(value);
  return size >= 10 ** digits && size < 1e15 ? value.toFixed(0) : value.toPrecision(digits);
}
