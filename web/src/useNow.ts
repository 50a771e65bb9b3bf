import { useEffect, useState } from "react";

/** The current time, updated once a second while something on screen depends on it. */
export function useNow(isTicking = true): number {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    if (!isTicking) return;
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [isTicking]);
  return now;
}
