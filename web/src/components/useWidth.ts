import { useEffect, useState } from "react";

/** The width of an element in whole pixels, 0 until it was laid out; a picture drawn to it stays while it is out of the layout. */
export function useWidth<Held extends Element>(): { ref: (node: Held | null) => void; width: number } {
  const [node, ref] = useState<Held | null>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (node === null) return;
    const observer = new ResizeObserver(([entry]) => {
      const measured = Math.floor(entry?.contentRect.width ?? 0);
      if (measured > 0) setWidth(measured);
    });
    observer.observe(node);
    return () => observer.disconnect();
  }, [node]);
  return { ref, width };
}
