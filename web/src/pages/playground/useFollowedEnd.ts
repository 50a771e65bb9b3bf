import { useEffect, useRef } from "react";

/** Maximum distance from the end of the page at which the page keeps scrolling to the end. */
const NEAR_PX = 160;

/** Keeps the end of growing content in view, unless the user has scrolled away from it. */
export function useFollowedEnd(grows: unknown) {
  const ref = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useEffect(() => {
    const check = () => {
      follows.current = innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR_PX;
    };
    addEventListener("scroll", check, { passive: true });
    return () => removeEventListener("scroll", check);
  }, []);
  useEffect(() => {
    if (follows.current) scrollTo({ top: document.documentElement.scrollHeight });
  }, [grows]);
  return { ref, follow: () => void (follows.current = true) };
}
