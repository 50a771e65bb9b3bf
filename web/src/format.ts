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

/** The time of one step: three figures, in ms below a second. */
export function stepTime(seconds: number): string {
  return seconds < 1 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`;
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
