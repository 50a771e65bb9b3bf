import { useEffect, useRef } from "react";

/** So near the end of the page somebody reads along. */
const NEAR_PX = 160;

/** Keeps the end of what grows in sight, unless somebody has scrolled away from it. */
export function useFollowedEnd(grows: unknown) {
  const ref = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useEffect(() => {
    const look = () => {
      follows.current = innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR_PX;
    };
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  useEffect(() => {
    if (follows.current) scrollTo({ top: document.documentElement.scrollHeight });
  }, [grows]);
  return { ref, follow: () => void (follows.current = true) };
}
