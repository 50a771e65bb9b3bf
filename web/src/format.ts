/** Numbers as people read them. All figures are in SI units and tabular width. */

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
  return value.toLocaleString("en");
}

/** Seconds in the two largest units that matter: "1 h 4 min", "12 s", "0.35 s". */
export function duration(seconds: number): string {
  if (seconds < 1) return `${seconds.toPrecision(2)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

/** Seconds, unit, and the least number of it. */
const LONG = [
  [365.25 * 86_400, "years", 2],
  [86_400, "days", 2],
  [3600, "h", 2],
  [60, "min", 2],
] as const;

/** The time of one step, as `share_compute.planning.words.seconds_text` writes it: "12.4 ms", "1.31 s", "3.2 min". */
export function stepTime(seconds: number): string {
  for (const [unitSeconds, unit, least] of LONG) {
    if (seconds >= least * unitSeconds) return `${oneDecimal(seconds / unitSeconds)} ${unit}`;
  }
  // Compared as it will be written, so that 0.99996 s is no "1000.0 ms".
  if (Math.round(seconds * 1e4) >= 1e4) return `${seconds.toFixed(2)} s`;
  if (Math.round(seconds * 1e6) >= 1e3) return `${oneDecimal(seconds * 1e3)} ms`;
  return `${Math.round(seconds * 1e6)} us`;
}

function oneDecimal(value: number): string {
  return value.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
}

/** By how much one time is above another: "+25%". */
export function difference(measured: number, predicted: number): string {
  const share = Math.round((measured / predicted - 1) * 100);
  return `${share < 0 ? "−" : "+"}${Math.abs(share)}%`;
}

/** How long ago a moment was: "just now", "12 s ago". */
export function ago(moment: string, now: number): string {
  const seconds = (now - Date.parse(moment)) / 1000;
  return seconds < 2 ? "just now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

/** Three figures at most, always in ms, so that links can be compared down a column. */
export function latency(seconds: number): string {
  const milliseconds = seconds * 1e3;
  return `${milliseconds < 10 ? milliseconds.toFixed(2) : Math.round(milliseconds)} ms`;
}

export function clock(moment: string): string {
  return new Date(moment).toLocaleTimeString("en-GB");
}

export function dateAndTime(moment: string): string {
  return new Date(moment).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
}

export function loss(value: number): string {
  return value.toPrecision(4);
}
