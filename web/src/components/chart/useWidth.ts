import { useLayoutEffect, useState } from "react";

/**
 * The width of an element's content in whole pixels, measured before the first paint, so that content below does not
 * move later. The last width is kept while the element is not laid out.
 */
export function useWidth<Held extends Element>(): { ref: (node: Held | null) => void; width: number } {
  const [node, ref] = useState<Held | null>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    if (node === null) return;
    const { paddingLeft, paddingRight } = getComputedStyle(node);
    setWidth(Math.floor(node.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight)));
    const observer = new ResizeObserver(([entry]) => {
      const measured = Math.floor(entry?.contentRect.width ?? 0);
      if (measured > 0) setWidth(measured);
    });
    observer.observe(node);
    return () => observer.disconnect();
  }, [node]);
  return { ref, width };
}
