import { useEffect, useRef, useState } from "react";

import type { Plan } from "../api/types";
import { blocksOf, changes, pictureHeight, type Block, type Size } from "./layout";

/** Time for which a removed machine is still shown, marked as gone. */
const SHOWN_GONE_MS = 2600;

interface Shown {
  height: number;
  blocks: Block[];
  /** Last positions of machines that were just removed. */
  gone: Block[];
  /** Machines that were just added. */
  come: ReadonlySet<string>;
}

/** The position of every machine, including those that were just removed or added. */
export function useBlocks(plan: Plan, size: Size): Shown {
  const height = pictureHeight(plan);
  const blocks = blocksOf(plan, size, height);
  const before = useRef<Block[]>(blocks);
  const [changed, setChanged] = useState<Pick<Shown, "gone" | "come">>({ gone: [], come: new Set() });
  const held = blocks.map((block) => block.id).join();

  useEffect(() => {
    const { gone, come } = changes(before.current, blocks);
    if (gone.length > 0 || come.size > 0) setChanged({ gone, come });
  }, [held]);
  useEffect(() => {
    if (changed.gone.length === 0 && changed.come.size === 0) return;
    const timer = setTimeout(() => setChanged({ gone: [], come: new Set() }), SHOWN_GONE_MS);
    return () => clearTimeout(timer);
  }, [changed]);
  // Runs after the comparison above, which needs the previous state.
  useEffect(() => {
    before.current = blocks;
  });
  const here = new Set(blocks.map((block) => block.id));
  return { height, blocks, gone: changed.gone.filter((block) => !here.has(block.id)), come: changed.come };
}
