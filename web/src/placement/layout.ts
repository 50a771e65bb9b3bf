/** Geometry of the placement picture. */
import type { Branch, Plan, Stage } from "../api/types";
import { locale } from "../i18n";

/** Minimum width of a stage, as a fraction of the bar, so that one layer beside a hundred is still visible. */
const LEAST_SHARE = 0.04;
/** Height of one machine in a stage of several, and maximum height of the picture. */
const ROW_PX = 44;
const MOST_PX = 440;
const LEAST_PX = 132;
/** Minimum height at which a machine can be hovered. */
const THINNEST_PX = 12;

/** The quantity that the width of a stage shows. */
export type Size = "layers" | "memory";

/** The position of a machine in the picture. */
export interface Block {
  id: string;
  name: string;
  stage: number;
  /** Index in the stage. */
  seat: number;
  /** Fractions of the picture's width. */
  left: number;
  width: number;
  top: number;
  height: number;
}

/** The plan of one branch: its stages, and its prediction if there is one. */
export function planOfBranch(plan: Plan, { stages, step_s }: Branch): Plan {
  const { prediction } = plan;
  return { ...plan, stages, prediction: prediction == null || step_s == null ? null : { ...prediction, step_s } };
}

/** Names of the machines, in the order of the stages. */
export function namesOf(stages: readonly Stage[]): string[] {
  return stages.flatMap((stage) => stage.members.map((member) => member.name));
}

/** Width of each stage as a fraction of the bar: its layers or memory, raised to the minimum and rescaled. */
export function stageShares(plan: Pick<Plan, "num_layers" | "stages">, size: Size = "layers"): number[] {
  const sizes = plan.stages.map((stage) => sizeOf(stage, size));
  const whole = sizes.reduce((sum, one) => sum + one, 0) || 1;
  const least = Math.min(LEAST_SHARE, 0.5 / plan.stages.length);
  const raised = sizes.map((one) => Math.max(one / whole, least));
  const total = raised.reduce((sum, share) => sum + share, 0);
  return raised.map((share) => share / total);
}

function sizeOf(stage: Stage, size: Size): number {
  if (size === "layers") return stage.stop - stage.start;
  return Math.max(0, ...stage.members.map((member) => member.memory_bytes));
}

/** Height of the machines' part of the picture: a row for each member of the largest stage. */
export function pictureHeight(plan: Pick<Plan, "stages">): number {
  const most = Math.max(1, ...plan.stages.map((stage) => stage.members.length));
  return Math.min(MOST_PX, Math.max(LEAST_PX, most * ROW_PX));
}

/** The position of every machine: a column for each stage, divided by its members' shares of the microbatches. */
export function blocksOf(plan: Plan, size: Size, height: number): Block[] {
  const shares = stageShares(plan, size);
  let left = 0;
  return plan.stages.flatMap((stage, index) => {
    const width = shares[index] ?? 0;
    const start = left;
    left += width;
    let top = 0;
    const heights = memberHeights(stage, height);
    return stage.members.map((member, seat) => {
      const own = heights[seat] ?? 0;
      top += own;
      return { id: member.contributor_id, name: member.name, stage: index, seat, left: start, width, top: top - own, height: own };
    });
  });
}

function memberHeights(stage: Stage, height: number): number[] {
  const computed = stage.members.map((member) => member.microbatches.length);
  const whole = computed.reduce((sum, one) => sum + one, 0) || 1;
  const raised = computed.map((one) => Math.max((one / whole) * height, THINNEST_PX));
  const total = raised.reduce((sum, one) => sum + one, 0) || 1;
  return raised.map((one) => (one / total) * height);
}

/** Machines that a new plan removes, and machines that it adds. */
export function changes(before: readonly Block[], after: readonly Block[]): { gone: Block[]; come: Set<string> } {
  const now = new Set(after.map((block) => block.id));
  const then = new Set(before.map((block) => block.id));
  return {
    gone: before.filter((block) => !now.has(block.id)),
    come: new Set([...now].filter((id) => !then.has(id))),
  };
}

/** Layers [3, 8) as "3–7". */
export function layerRange(stage: Pick<Stage, "start" | "stop">): string {
  return stage.stop - stage.start === 1 ? `${stage.start}` : `${stage.start}–${stage.stop - 1}`;
}

/** [0, 1, 2, 5] as "0–2, 5". */
export function ranges(ids: readonly number[]): string {
  const runs: [number, number][] = [];
  for (const id of [...ids].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last !== undefined && id === last[1] + 1) last[1] = id;
    else runs.push([id, id]);
  }
  return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

/** "ash, birch, and cedar"; Chinese has spaces between its own characters and Latin names. */
export function joined(names: readonly string[]): string {
  const parts = new Intl.ListFormat(locale()).formatToParts(names);
  return parts.map(({ type, value }) => (type === "literal" && value === "和" ? " 和 " : value)).join("");
}
